"""saver.resume(wait=False): its Pending is queried, waited for and dropped, in any order with other steps."""

from random import Random
from typing import Any

import torch
from ebbtide import saver
from ebbtide.errors import Error, StateError

from ..attempt import Attempt
from ..device import IS_SIM
from ..model import Failure, Skip
from ..world import World
from . import Arguments, Operation, register
from .moves import RESUME_EVENTS, may_resume_fail, resume_all


@register
class ResumeBehind(Operation):
    """Calls resume(wait=False). The Pending is kept, dropped, or waited for in a `with`."""

    name = "resume_behind"
    weight = 5

    def draw(self, world: World, rng: Random) -> Arguments | None:
        actor, tags = world.draw_actor(rng), world.draw_tags(rng)
        return {
            "number": world.model.new_number(),
            "actor": actor,
            "tags": tags,
            "retain": rng.choice((None, None, True, False)),
            "hold_stream": rng.random() < 0.7,
            "then": rng.choice(("keep", "keep", "drop", "wait")),
            "trouble": world.draw_trouble(rng, actor, tags, RESUME_EVENTS[:1]),
        }

    def run(
        self, world: World, number: int, actor: int, tags: list[str], then: str, trouble: list[Any] | None, **rest: Any
    ) -> str:
        pendings = world.model.pendings

        def call() -> Any:
            pending = saver.resume(*tags, wait=False, **rest)
            if then == "wait":
                with pending:
                    pass
            elif not pending.done and not IS_SIM:
                pending.wait()
            if trouble is not None and trouble[0] == "fault":
                pending.wait()
            return pending

        def effect(pending: Any) -> None:
            resume_all(world, tags)
            if then == "keep" and pending is not None:
                pendings[number] = (pending, tags)

        return Attempt(
            world.model,
            lambda: world.actors.run(actor, call),
            effect,
            trouble=trouble,
            refuses=StateError if world.is_unknown(tags) else None,
            may_fail=may_resume_fail(world, tags),
            touched=world.model.of_tags(tags),
        ).run()


@register
class AskPending(Operation):
    """Calls done, ready, stream_wait, attach or wait: any number of times, also long after the resume has ended."""

    name = "ask_pending"
    weight = 4

    def draw(self, world: World, rng: Random) -> Arguments | None:
        pendings, memories = list(world.model.pendings), list(world.model.memories)
        if not pendings or not memories:
            return None
        return {
            "number": rng.choice(pendings),
            "what": rng.choice(("done", "ready", "stream_wait", "attach", "wait", "wait", "drop")),
            "memory": rng.choice(memories),
            "actor": world.draw_actor(rng),
        }

    def run(self, world: World, number: int, what: str, memory: int, actor: int) -> str:
        if number not in world.model.pendings:
            raise Skip
        pending, _ = world.model.pendings[number]
        base = world.model.memory(memory).base
        module = torch.nn.Linear(2, 2, device="meta")

        def call() -> Any:
            if what == "ready":
                return pending.ready(base)
            if what == "stream_wait":
                return pending.stream_wait(tensors=[base])
            if what == "attach":
                return pending.attach(module).remove()
            return pending.wait() if what == "wait" else pending.done

        if what == "drop":
            del world.model.pendings[number], pending
            return "dropped"
        try:
            result = world.actors.run(actor, call)
        except Error as error:
            raise Failure(f"a resume that went well fails afterwards: {error}") from error
        for _, event, tag in world.calls_of_hooks:
            status = saver.tags()[tag]
            if event == "after_resume" and status.state == "paused" and not status.resident_bytes:
                raise Failure(f"an after_resume hook of {tag!r} ran, and the tag is paused")
        if what in ("done", "ready") and result is not True:
            raise Failure(f"{what} is {result} of a resume that is over")
        return "done"
