"""Queries, which change nothing, and bad arguments, which are refused before anything else happens."""

from collections.abc import Callable
from random import Random
from typing import Any

import torch
from ebbtide import saver
from ebbtide.errors import StateError

from ..model import Failure
from ..world import World
from . import Arguments, Operation, register


@register
class Ask(Operation):
    """Calls stats, tags, timeline, is_paused, outside or explain, from any thread and in any state."""

    name = "ask"
    weight = 3

    def draw(self, world: World, rng: Random) -> Arguments | None:
        what = rng.choice(("stats", "tags", "timeline", "is_paused", "print", "outside", "explain"))
        return {"actor": world.draw_actor(rng), "what": what}

    def run(self, world: World, actor: int, what: str) -> None:
        def ask() -> None:
            if what == "is_paused":
                for tag in world.model.known_tags():
                    self._check(world, tag)
            elif what == "outside":
                self._check_outside(world)
            elif what == "explain":
                for tag in world.model.known_tags()[:1]:
                    check_explanation(tag)
            elif what == "print":
                assert str(saver.tags()) and all(str(event) for event in saver.timeline[-5:])
            elif what == "timeline":
                events = saver.timeline
                if [event.sequence for event in events] != sorted(event.sequence for event in events):
                    raise Failure("the timeline is out of order")
                if len(events) > 1024:
                    raise Failure("the timeline is longer than it says")
            else:
                assert all(value >= 0 for value in saver.stats().values())
                assert world.model.named <= set(saver.tags())

        world.actors.run(actor, ask)

    @staticmethod
    def _check(world: World, tag: str) -> None:
        memories = [memory for memory in world.model.of_tags([tag]) if not memory.policy.overflow]
        if any(memory.is_paused for memory in memories) and not saver.is_paused(tag):
            raise Failure(f"is_paused({tag!r}) is False, and a tensor of it is away")

    @staticmethod
    def _check_outside(world: World) -> None:
        memories = [memory for memory in world.model.memories.values() if memory.size_bytes]
        if not memories:
            return
        found = {row.address for row in saver.outside([memory.base for memory in memories]).rows}
        expected = {memory.address for memory in memories if memory.tag is None}
        if found != expected:
            raise Failure(f"outside gave {sorted(found)}, not {sorted(expected)}")
        for tag in world.model.known_tags():
            elsewhere = {row.address: row.tag for row in saver.outside([memories[0].base], tag=tag).rows}
            if elsewhere != ({} if memories[0].tag == tag else {memories[0].address: memories[0].tag}):
                raise Failure(f"outside of {tag!r} gave {elsewhere}")


def check_explanation(tag: str, copied: int = 0) -> None:
    """`copied`: what the report of a pause that just ended has for the tag."""
    found, status = saver.explain(tag), saver.tags()[tag]
    told = found.changed + found.copied
    skipped = found.clean + found.unused + found.constant + found.dropped + found.on_host
    if told < copied or told + skipped > status.size_bytes or sum(size for _, size, _ in found.blocks) != told:
        raise Failure(
            f"explain of {tag!r} gave {found}, after a pause that copied {copied} of {status.size_bytes} bytes"
        )
    named = sum(tensor.bytes for tensor in found.tensors)
    if named + found.unnamed < told or found.uncompared > found.copied or not str(found):
        raise Failure(f"explain of {tag!r} named {named} of {told} bytes, and left {found.unnamed}")


SPARSE = torch.eye(3).to_sparse()  # made here, because the device may be full at the time of the mistake
MISTAKES: dict[str, tuple[Callable[[World], Any], tuple[type[BaseException], ...]]] = {
    "tag_type": (lambda world: saver.region(3), (TypeError,)),  # type: ignore[arg-type]
    "tag_empty": (lambda world: saver.region(""), (ValueError,)),
    "tag_reserved": (lambda world: saver.region("a/b"), (ValueError,)),
    "tag_star": (lambda world: saver.pause("*"), (ValueError,)),
    "tag_long": (lambda world: saver.resume("x" * 256), (ValueError,)),
    "tag_control": (lambda world: saver.trim("a\nb"), (ValueError,)),
    "backup": (lambda world: saver.region("a", backup="tape"), (ValueError,)),  # type: ignore[arg-type]
    "retain": (lambda world: saver.region("a", backup=None, retain=True), (ValueError,)),
    "retain_type": (lambda world: saver.region("a", retain=1), (TypeError,)),  # type: ignore[arg-type]
    "overflow": (lambda world: saver.region("a", overflow="most"), (ValueError,)),  # type: ignore[arg-type]
    "threads": (lambda world: saver.region("a", threads="some"), (ValueError,)),  # type: ignore[arg-type]
    "decorate_class": (lambda world: saver.region("a")(int), (TypeError,)),
    "pause_backup": (lambda world: saver.pause(world.tag("a"), backup=1), (ValueError,)),  # type: ignore[arg-type]
    "pause_unknown": (lambda world: saver.pause(world.tag("never")), (StateError,)),
    "resume_unknown": (lambda world: saver.resume(world.tag("never")), (StateError,)),
    "behind_unknown": (lambda world: saver.resume(world.tag("never"), wait=False), (StateError,)),
    "prepare_unknown": (lambda world: saver.prepare(world.tag("never"), wait=False), (StateError,)),
    "trim_unknown": (lambda world: saver.trim(world.tag("never")), (StateError,)),
    "promote_unknown": (lambda world: saver.promote(world.tag("never")), (StateError,)),
    "demote_unknown": (lambda world: saver.demote(world.tag("never")), (StateError,)),
    "demote_bytes": (lambda world: saver.demote(world.tag("a"), max_bytes=-1), (ValueError,)),
    "demote_bytes_type": (lambda world: saver.demote(max_bytes=1.5), (TypeError,)),  # type: ignore[arg-type]
    "paused_unknown": (lambda world: saver.paused(world.tag("never")).__enter__(), (StateError,)),
    "is_paused_unknown": (lambda world: saver.is_paused(world.tag("never")), (StateError,)),
    "is_paused_type": (lambda world: saver.is_paused(None), (TypeError,)),  # type: ignore[arg-type]
    "timeout": (lambda world: saver.resume(timeout=-1), (ValueError,)),
    "timeout_type": (lambda world: saver.resume(timeout="1"), (TypeError,)),  # type: ignore[call-overload]
    "resume_retain": (lambda world: saver.resume(retain=2), (TypeError,)),  # type: ignore[call-overload]
    "order": (lambda world: saver.resume(order=[3]), (TypeError,)),
    "swap_both": (lambda world: saver.swap(pause="a", resume="a"), (ValueError,)),
    "swap_none": (lambda world: saver.swap(pause=[], resume="a"), (ValueError,)),
    "swap_type": (lambda world: saver.swap(pause=3, resume="b"), (TypeError,)),  # type: ignore[arg-type]
    "pause_empty": (lambda world: saver.pause([]), (ValueError,)),
    "is_paused_list": (lambda world: saver.is_paused(["a"]), (TypeError,)),  # type: ignore[arg-type]
    "explain_list": (lambda world: saver.explain(["a"]), (TypeError,)),  # type: ignore[arg-type]
    "survivors_list": (lambda world: saver.survivors(["a"]), (TypeError,)),  # type: ignore[arg-type]
    "on_event": (lambda world: saver.on("during", "a", print), (ValueError,)),  # type: ignore[arg-type]
    "on_callable": (lambda world: saver.on("before_pause", "a", None), (TypeError,)),  # type: ignore[arg-type]
    "adopt_object": (lambda world: saver.adopt(object(), tag=world.tag("a")), (TypeError,)),
    "backup_of": (lambda world: saver.backup_of(3), (TypeError,)),  # type: ignore[arg-type]
    "backup_of_sparse": (lambda world: saver.backup_of(SPARSE), (TypeError,)),
    "size": (lambda world: saver.configure(device_limit="much"), (ValueError,)),
    "size_negative": (lambda world: saver.configure(host_limit=-1), (ValueError,)),
    "size_none": (lambda world: saver.configure(host_margin=None), (TypeError,)),
    "switch": (lambda world: saver.configure(skip_clean=1), (TypeError,)),  # type: ignore[arg-type]
    "one_of_two": (lambda world: saver.configure(device_limit=1, host_limit="?"), (ValueError,)),
    "folder": (lambda world: saver.configure(disk_directory=3), (TypeError,)),  # type: ignore[arg-type]
    "leave_unentered": (lambda world: saver.region("a").__exit__(None, None, None), (StateError,)),
}


@register
class Mistake(Operation):
    """Makes one bad call."""

    name = "mistake"
    weight = 3

    def draw(self, world: World, rng: Random) -> Arguments | None:
        return {"actor": world.draw_actor(rng), "what": rng.choice(list(MISTAKES))}

    def run(self, world: World, actor: int, what: str) -> None:
        call, kinds = MISTAKES[what]
        try:
            world.actors.run(actor, lambda: call(world))
        except kinds as error:
            if not str(error):
                raise Failure(f"{what}: an error without a word") from error
            return
        raise Failure(f"{what} was accepted")
