"""saver.on: hooks that record their calls. Each before-hook that ran must be followed by an after-hook."""

from random import Random

from ebbtide import saver

from ..attempt import Attempt
from ..model import Skip
from ..overrides import AS_ALLOCATED
from ..world import World
from . import Arguments, Operation, register
from .moves import may_pause_fail, pause_all, refusal

EVENTS = ("before_pause", "after_pause", "before_resume", "after_resume")


@register
class Watch(Operation):
    """Adds hooks for all four events of a tag, which record their calls. checks.py examines the records after each
    step."""

    name = "watch"
    weight = 3

    def draw(self, world: World, rng: Random) -> Arguments | None:
        tags = world.draw_tags(rng, may_be_none=False)
        if not tags or len(world.model.hooks) > 2:
            return None
        return {"number": world.model.new_number(), "tag": rng.choice([*tags, "*"])}

    def run(self, world: World, number: int, tag: str) -> None:
        removers = [
            saver.on(event, tag, lambda moved, event=event: world.calls_of_hooks.append((number, event, moved)))
            for event in EVENTS
        ]
        world.model.hooks[number] = removers


@register
class Unwatch(Operation):
    """Removes the hooks. A second removal does nothing."""

    name = "unwatch"
    weight = 1

    def draw(self, world: World, rng: Random) -> Arguments | None:
        return {"number": rng.choice(list(world.model.hooks))} if world.model.hooks else None

    def run(self, world: World, number: int) -> None:
        if number not in world.model.hooks:
            raise Skip
        for remove in world.model.hooks.pop(number):
            remove()
            remove()


@register
class HookThatAsks(Operation):
    """Adds a hook around a pause that uses ebbtide itself: queries, and an operation on another tag."""

    name = "hook_that_asks"
    weight = 1

    def draw(self, world: World, rng: Random) -> Arguments | None:
        tags = world.draw_tags(rng, may_be_none=False)
        others = [tag for tag in world.model.known_tags() if tag not in tags]
        if not tags or not others:
            return None
        return {"tags": tags, "other": rng.choice(others), "event": rng.choice(EVENTS[:2])}

    def run(self, world: World, tags: list[str], other: str, event: str) -> str:
        if world.is_unknown([*tags, other]):
            raise Skip

        def ask(tag: str) -> None:
            assert tag in tags and saver.stats() and tag in saver.tags()
            saver.is_paused(tag)
            saver.prepare(other)

        remove = saver.on(event, "*", ask)  # type: ignore[arg-type]
        try:
            return Attempt(
                world.model,
                lambda: saver.pause(*tags),
                lambda _: pause_all(world, tags, AS_ALLOCATED),
                refuses=refusal(world, tags, False, leased_counts=True),
                may_fail=may_pause_fail(world, tags),
                touched=world.model.of_tags(tags),
                is_doubtful_after=lambda: True,  # the call of the hook may have been refused after the pause
            ).run()
        finally:
            remove()
