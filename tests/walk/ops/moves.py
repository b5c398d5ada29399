"""pause, resume, swap, paused(), prepare, trim, promote and demote."""

from collections import Counter
from random import Random
from typing import Any

import torch
from ebbtide import _core, saver
from ebbtide.errors import OutOfMemoryError, StateError
from ebbtide.sizes import parse_size

from .. import device
from ..attempt import Attempt, host_may_refuse
from ..model import Failure, Memory
from ..overrides import Override, draw_override, keeps, leaving_of
from ..world import World
from . import Arguments, Operation, register
from .questions import check_explanation

PAUSE_EVENTS = ("before_pause", "after_pause")
RESUME_EVENTS = ("before_resume", "after_resume")


def refusal(world: World, tags: list[str], missing_ok: bool, *, leased_counts: bool) -> type[BaseException] | None:
    """The error that must come before anything moves."""
    if world.is_unknown(tags) and not missing_ok:
        return StateError
    return StateError if leased_counts and world.is_leased(tags) else None


def may_pause_fail(world: World, tags: list[str]) -> Any:
    """May fail at a limit of the host, or because of a view of memory that a failure has left partly away."""
    is_looked_at = bool(world.model.views) and any(memory.is_doubtful for memory in world.model.of_tags(tags))

    def may(error: BaseException) -> bool:
        return (is_looked_at and isinstance(error, StateError)) or host_may_refuse(world.model)(error)

    return may


def may_resume_fail(world: World, tags: list[str], *, is_after_pause: bool = False) -> Any:
    """May be out of memory, which must be true, or fail at a limit of the host."""
    wanted = sum(
        status.stored_bytes + status.dropped_bytes + (status.resident_bytes if is_after_pause else 0)
        for tag, status in saver.tags().items()
        if not tags or tag in tags
    )

    def may(error: BaseException) -> bool:
        if isinstance(error, OutOfMemoryError):
            room = device.room_bytes()
            if room >= wanted:
                raise Failure(f"out of memory for {wanted} bytes, and there is room for {room}: {error}") from error
            return True
        return host_may_refuse(world.model)(error)

    return may


def pause_all(world: World, tags: list[str], backup: Override) -> None:
    for memory in world.model.of_tags(tags):
        world.model.pause(memory, keeps(memory, backup))


def resume_all(world: World, tags: list[str]) -> None:
    for memory in world.model.of_tags(tags):
        world.model.resume(memory)


def droppable(world: World, tags: list[str], backup: Override) -> list[Memory]:
    return [memory for memory in world.model.of_tags(tags) if not memory.is_paused and not keeps(memory, backup)]


@register
class Pause(Operation):
    """Calls saver.pause."""

    name = "pause"
    weight = 14

    def draw(self, world: World, rng: Random) -> Arguments | None:
        actor, tags = world.draw_actor(rng), world.draw_tags(rng)
        if rng.random() < 0.15:
            tags = [*tags, world.tag("never")]
        return {
            "actor": actor,
            "tags": tags,
            "backup": draw_override(rng, tags),
            "missing_ok": rng.random() < 0.2,
            "trouble": world.draw_trouble(rng, actor, tags, PAUSE_EVENTS),
        }

    def run(
        self, world: World, actor: int, tags: list[str], backup: Override, missing_ok: bool, trouble: list[Any] | None
    ) -> str:
        leaving, options = leaving_of(tags, backup)

        def effect(report: Any) -> None:
            pause_all(world, tags, backup)
            if trouble is not None:  # a hook may have moved the tag since, or there is no report
                return
            copied = Counter[str]()
            for row in report.rows:
                copied[row.tag] += row.copied
            for tag, size_bytes in copied.most_common(1):  # each takes longer than the pause
                check_explanation(tag, size_bytes)

        return Attempt(
            world.model,
            lambda: world.actors.run(actor, lambda: saver.pause(*leaving, missing_ok=missing_ok, **options)),
            effect,
            trouble=trouble,
            refuses=refusal(world, tags, missing_ok, leased_counts=True),
            may_fail=may_pause_fail(world, tags),
            touched=world.model.of_tags(tags),
            drops=droppable(world, tags, backup),
        ).run()


@register
class Resume(Operation):
    """Calls saver.resume, also in an order of its own and with patience."""

    name = "resume"
    weight = 14

    def draw(self, world: World, rng: Random) -> Arguments | None:
        actor, tags = world.draw_actor(rng), world.draw_tags(rng)
        memories = list(world.model.memories)
        return {
            "actor": actor,
            "tags": tags,
            "missing_ok": rng.random() < 0.2,
            "retain": rng.choice((None, None, None, True, False)),
            "timeout": rng.choice((None, None, None, 0, 0.02)),
            "order": rng.sample(memories, min(len(memories), 3)) if rng.random() < 0.3 else None,
            "trouble": world.draw_trouble(rng, actor, tags, RESUME_EVENTS),
        }

    def run(self, world: World, actor: int, tags: list[str], order: list[int] | None, **rest: Any) -> str:
        trouble = rest.pop("trouble")
        tensors = None
        if order is not None:
            tensors = [world.model.memories[number].base for number in order if number in world.model.memories]
        return Attempt(
            world.model,
            lambda: world.actors.run(actor, lambda: saver.resume(*tags, order=tensors, **rest)),
            lambda _: resume_all(world, tags),
            trouble=trouble,
            refuses=refusal(world, tags, rest["missing_ok"], leased_counts=False),
            may_fail=may_resume_fail(world, tags),
            touched=world.model.of_tags(tags),
        ).run()


@register
class Swap(Operation):
    """Calls saver.swap."""

    name = "swap"
    weight = 8

    def draw(self, world: World, rng: Random) -> Arguments | None:
        leaving = world.draw_tags(rng, may_be_none=False)
        returning = [tag for tag in world.draw_tags(rng, may_be_none=False) if tag not in leaving]
        if not leaving or not returning:
            return None
        actor = world.draw_actor(rng)
        return {
            "actor": actor,
            "leaving": leaving,
            "returning": returning,
            "backup": draw_override(rng, leaving),
            "retain": rng.choice((None, None, True, False)),
            "trouble": world.draw_trouble(rng, actor, leaving, (*PAUSE_EVENTS, *RESUME_EVENTS)),
        }

    def run(
        self,
        world: World,
        actor: int,
        leaving: list[str],
        returning: list[str],
        backup: Override,
        retain: bool | None,
        trouble: list[Any] | None,
    ) -> str:
        out, options = leaving_of(leaving, backup)

        def call() -> Any:
            one = out[0] if isinstance(backup, dict) else out
            return saver.swap(pause=one, resume=returning, retain=retain, **options)

        def effect(_: Any) -> None:
            pause_all(world, leaving, backup)
            resume_all(world, returning)

        pause_fails = may_pause_fail(world, leaving)
        resume_fails = may_resume_fail(world, returning)
        is_unknown = world.is_unknown([*leaving, *returning])
        return Attempt(
            world.model,
            lambda: world.actors.run(actor, call),
            effect,
            trouble=trouble,
            refuses=StateError if is_unknown or world.is_leased(leaving) else None,
            may_fail=lambda error: pause_fails(error) or resume_fails(error),
            touched=world.model.of_tags([*leaving, *returning]),
            drops=droppable(world, leaving, backup),
        ).run()


@register
class Paused(Operation):
    """A `with saver.paused(...)` in which other things happen: a tensor of one of the tags is made, another one
    dies."""

    name = "paused"
    weight = 6

    def draw(self, world: World, rng: Random) -> Arguments | None:
        tags = world.draw_tags(rng)
        actor = world.draw_actor(rng)
        memories = [
            number
            for number, memory in world.model.memories.items()
            if memory.tag in tags and memory.holder is None  # a module would keep it alive
        ]
        return {
            "actor": actor,
            "tags": tags,
            "backup": draw_override(rng, tags),
            "dies": rng.choice(memories) if memories and rng.random() < 0.3 else None,
            "allocates": bool(tags) and rng.random() < 0.3,
            "trouble": world.draw_trouble(rng, actor, tags),
        }

    def run(
        self,
        world: World,
        actor: int,
        tags: list[str],
        backup: Override,
        dies: int | None,
        allocates: bool,
        trouble: list[Any] | None,
    ) -> str:
        model = world.model
        dying = model.memories.get(dies) if dies is not None else None
        staying = [memory for memory in model.of_tags(tags) if memory is not dying]
        del dying
        returning = [memory for memory in staying if not memory.is_paused]
        has_begun: list[bool] = []
        leaving, options = leaving_of(tags, backup)

        def call() -> None:
            with saver.paused(*leaving, **options):
                has_begun.append(True)
                if dies in model.memories:
                    world.forget(dies)
                for memory in returning:
                    if not memory.has_spilled and not memory.is_away():
                        raise Failure("it is not away inside paused()")
                if allocates:
                    with saver.region(tags[0]):
                        torch.empty(1000, dtype=torch.uint8, device=saver.device)

        def effect(_: Any) -> None:
            for memory in returning:
                model.pause(memory, keeps(memory, backup))
                model.resume(memory)

        pause_fails, resume_fails = may_pause_fail(world, tags), may_resume_fail(world, tags, is_after_pause=True)

        def may_fail(error: BaseException) -> bool:
            if not has_begun:
                return pause_fails(error)
            is_full = isinstance(error, OutOfMemoryError | torch.OutOfMemoryError)
            return (allocates and is_full) or resume_fails(error)

        return Attempt(
            model,
            lambda: world.actors.run(actor, call),
            effect,
            trouble=trouble,
            refuses=refusal(world, tags, False, leased_counts=True),
            may_fail=may_fail,
            touched=staying,
            drops=[memory for memory in returning if not keeps(memory, backup)],
            is_doubtful_after=lambda: bool(has_begun),
        ).run()


@register
class Prepare(Operation):
    """Calls saver.prepare with and without copies, and waits for it at once or not at all."""

    name = "prepare"
    weight = 4

    def draw(self, world: World, rng: Random) -> Arguments | None:
        actor, tags = world.draw_actor(rng), world.draw_tags(rng)
        trouble = world.draw_trouble(rng, actor, tags)
        return {
            "actor": actor,
            "tags": tags,
            "copy": rng.random() < 0.5,
            "wait": rng.random() < 0.6,
            "trouble": trouble,
        }

    def run(self, world: World, actor: int, tags: list[str], copy: bool, wait: bool, trouble: list[Any] | None) -> str:
        def call() -> Any:
            made = saver.prepare(*tags, copy=copy, wait=wait)
            return made if wait else made.wait()

        return Attempt(
            world.model,
            lambda: world.actors.run(actor, call),
            trouble=trouble,
            refuses=refusal(world, tags, False, leased_counts=False),
            may_fail=host_may_refuse(world.model),
        ).run()


@register
class TrimOrPromote(Operation):
    """Calls saver.trim or saver.promote: no living memory changes its address or its bytes."""

    name = "trim_or_promote"
    weight = 8

    def draw(self, world: World, rng: Random) -> Arguments | None:
        actor, tags = world.draw_actor(rng), world.draw_tags(rng)
        return {
            "actor": actor,
            "tags": tags,
            "what": rng.choice(("trim", "promote")),
            "trouble": world.draw_trouble(rng, actor, tags),
        }

    def run(self, world: World, actor: int, tags: list[str], what: str, trouble: list[Any] | None) -> str:
        return Attempt(
            world.model,
            lambda: world.actors.run(actor, lambda: getattr(saver, what)(*tags)),
            trouble=trouble,
            refuses=refusal(world, tags, False, leased_counts=True),
            may_fail=host_may_refuse(world.model),
            touched=world.model.of_tags(tags),
        ).run()


@register
class Demote(Operation):
    """Calls saver.demote: no memory changes its address or its bytes, and nothing is away that was not before."""

    name = "demote"
    weight = 8

    def draw(self, world: World, rng: Random) -> Arguments | None:
        actor, tags = world.draw_actor(rng), world.draw_tags(rng)
        return {
            "actor": actor,
            "tags": tags,
            "max_bytes": rng.choice((None, None, None, 0, 2 << 20, "20MiB", "64MiB")),
            "missing_ok": rng.random() < 0.2,
            "trouble": world.draw_trouble(rng, actor, tags),
        }

    def run(
        self,
        world: World,
        actor: int,
        tags: list[str],
        max_bytes: int | str | None,
        missing_ok: bool,
        trouble: list[Any] | None,
    ) -> str:
        touched = world.model.of_tags(tags)

        def effect(report: Any) -> None:
            if report is None:
                return
            if max_bytes is not None and report.bytes > parse_size(max_bytes):
                raise Failure(f"{report.bytes} bytes left the device, and {max_bytes} were allowed")
            for memory in touched if max_bytes is None else ():
                info = _core.find(memory.address)
                if info is not None and not info.is_paused and info.resident_bytes > info.host_bytes:
                    raise Failure(f"memory of {memory.tag!r} is still on the device")

        return Attempt(
            world.model,
            lambda: world.actors.run(actor, lambda: saver.demote(*tags, max_bytes=max_bytes, missing_ok=missing_ok)),
            effect,
            trouble=trouble,
            refuses=refusal(world, tags, missing_ok, leased_counts=True),
            may_fail=host_may_refuse(world.model),
            touched=touched,
        ).run()
