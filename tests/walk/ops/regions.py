"""Regions that stay open over many steps, in every thread, and generators that are suspended in and outside of them."""

from collections.abc import Callable, Generator
from random import Random
from typing import Any

import torch
from ebbtide import saver

from .. import device
from ..attempt import Attempt
from ..model import Failure, Policy, Scope, Skip
from ..world import ACTORS, World
from . import Arguments, Operation, register
from .allocate import is_out_of_memory, may_enter_fail

DEPTH_MAX = 3


@register
class Enter(Operation):
    """Calls `__enter__` of a region or of `disabled()`, or makes a generator that is suspended inside its own
    `with`."""

    name = "enter"
    weight = 2.5

    def draw(self, world: World, rng: Random) -> Arguments | None:
        actor = world.draw_actor(rng)
        if len(world.model.routes.scopes[actor]) >= DEPTH_MAX:
            return None
        policy = None if rng.random() < 0.2 else world.draw_policy(rng)
        return {
            "number": world.model.new_number(),
            "actor": actor,
            "policy": policy,
            "in_generator": rng.random() < 0.25,
            "trouble": world.draw_trouble(rng, 1, []),
        }

    def run(
        self,
        world: World,
        number: int,
        actor: int,
        policy: list[Any] | None,
        in_generator: bool,
        trouble: list[Any] | None,
    ) -> str:
        region = None if policy is None else Policy(*policy)

        def call() -> Scope:
            manager = saver.disabled() if region is None else world.make_region(region)
            if not in_generator:
                manager.__enter__()
                return Scope(number, region, manager)

            def inside() -> Generator[None, None, None]:
                with manager:
                    yield

            generator = inside()
            next(generator)
            return Scope(number, region, manager, generator)

        def may_fail(error: BaseException) -> bool:
            return region is not None and may_enter_fail(world, region, error)

        def effect(scope: Scope) -> None:
            world.model.routes.open(actor, scope)

        outcome = Attempt(
            world.model, lambda: world.actors.run(actor, call), effect, trouble=trouble, may_fail=may_fail
        ).run()
        if region is not None and region.tag in saver.tags():
            world.model.named.add(region.tag)
        return outcome


@register
class Leave(Operation):
    """Leaves the innermost scope of a thread, or ends a generator wherever its scope is."""

    name = "leave"
    weight = 7

    def draw(self, world: World, rng: Random) -> Arguments | None:
        scopes = [
            scope.number
            for scopes in world.model.routes.scopes
            for scope in scopes
            if scope.generator is not None or scope is scopes[-1]
        ]
        if not scopes:
            return None
        return {"number": rng.choice(scopes), "how": rng.choice(("end", "collect")), "by": rng.choice((None, 0, 1))}

    def run(self, world: World, number: int, how: str, by: int | None) -> None:
        routes = world.model.routes
        actor, scope = routes.find(number)
        if scope.generator is None and scope is not routes.scopes[actor][-1]:
            raise Skip
        routes.close(actor, scope)
        if scope.generator is None:
            world.actors.run(actor, lambda: scope.manager.__exit__(None, None, None))
            return
        kept = [scope.generator]
        scope.generator = None
        is_collected = how == "collect" or (by is not None and by != actor)
        if is_collected:
            world.actors.run(actor if by is None else by, kept.clear)
        else:
            world.actors.run(actor, kept[0].close)


@register
class Generate(Operation):
    """Runs a decorated generator: it is inside the region while its body runs, in any thread, and outside while
    suspended."""

    name = "generate"
    weight = 4

    def draw(self, world: World, rng: Random) -> Arguments | None:
        waiting = list(world.model.generators)
        what = rng.choice(("start", "next", "next", "collect"))
        if what == "start" and len(waiting) < 3:
            number = world.model.new_number()
        elif what != "start" and waiting:
            number = rng.choice(waiting)
        else:
            return None
        return {
            "number": number,
            "what": what,
            "actor": rng.randrange(ACTORS),
            "policy": [*world.draw_policy(rng)[:4], "own"],
            "size": rng.choice((4096, 300_000)),
        }

    def run(self, world: World, number: int, what: str, actor: int, policy: list[Any], size: int) -> str:
        generators = world.model.generators
        if what == "start":
            region = Policy(*policy)
            generators[number] = (region, self._make(world, region, size))
            return "started"
        if number not in generators:
            raise Skip
        if what == "collect":
            kept = [generators.pop(number)[1]]
            world.actors.run(actor, kept.clear)
            return "collected"
        region, generator = generators[number]

        def effect(data_tag: str | None) -> None:
            world.model.named.add(region.tag)
            if data_tag != region.tag:
                raise Failure(f"a generator of {region.tag!r} allocated in {data_tag!r}")

        def may_fail(error: BaseException) -> bool:
            generators.pop(number, None)  # it has ended with the error
            is_full = is_out_of_memory(error) and device.room_bytes(bool(region.overflow)) < device.segment_bytes(size)
            return is_full or may_enter_fail(world, region, error)

        outcome = Attempt(
            world.model, lambda: world.actors.run(actor, lambda: next(generator)), effect, may_fail=may_fail
        ).run()
        if region.tag in saver.tags():
            world.model.named.add(region.tag)
        return outcome

    @staticmethod
    def _make(world: World, region: Policy, size: int) -> Generator[str | None, None, None]:
        from ebbtide import _core

        @world.make_region(region)
        def inside() -> Generator[str | None, None, None]:
            while True:
                made = torch.empty(size, dtype=torch.uint8, device=saver.device)
                info = _core.find(made.data_ptr())
                del made
                yield None if info is None else info.tag

        decorated: Callable[[], Generator[str | None, None, None]] = inside
        return decorated()
