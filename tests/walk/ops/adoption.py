"""saver.adopt: single tensors, views, modules with gradients and tied weights, and tensors that must not move."""

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import torch
from ebbtide import _core, saver
from ebbtide.errors import StateError

from .. import device
from ..attempt import Attempt, host_may_refuse
from ..model import Failure, Memory, Policy
from ..world import World
from . import Arguments, Operation, register
from .allocate import MEMORIES_MAX, is_out_of_memory, may_be_out_of_memory, may_enter_fail


class Tied(torch.nn.Module):
    """A module with two parameters over one storage, and a gradient."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.first = torch.nn.Parameter(torch.zeros(size, device=saver.device))
        self.second = torch.nn.Parameter(self.first.detach()[: size // 2])


@register
class MakeModule(Operation):
    """Makes a module with tied weights and a gradient: two memories with one holder."""

    name = "make_module"
    weight = 2

    def draw(self, world: World, rng: Random) -> Arguments | None:
        if len(world.model.memories) + 2 > MEMORIES_MAX:
            return None
        return {
            "weight": world.model.new_number(),
            "gradient": world.model.new_number(),
            "tied": world.model.new_number(),
            "actor": world.draw_actor(rng),
            "size": rng.choice((1000, 80_000, 300_000)),
            "value": rng.randrange(4000),
        }

    def run(self, world: World, weight: int, gradient: int, tied: int, actor: int, size: int, value: int) -> str:
        policy = world.model.routes.policy(actor)

        def call() -> torch.nn.Module:
            module = Tied(size)
            module.first.grad = torch.zeros_like(module.first)
            return module

        def effect(module: torch.nn.Module) -> None:
            for number, tensor in ((weight, module.first.data), (gradient, module.first.grad)):
                flat = tensor.view(torch.uint8)
                data = device.pattern("noise", value + number, flat.nbytes)
                device.write(flat, data)
                world.model.memories[number] = Memory(flat, data, policy, flat.data_ptr(), holder=module)
            shared = world.model.memories[weight]
            shared.aliases[tied] = (module.second.data.view(torch.uint8), 0)

        return Attempt(
            world.model, lambda: world.actors.run(actor, call), effect, may_fail=may_be_out_of_memory(8 * size, policy)
        ).run()


@register
class MakeForeign(Operation):
    """Makes a tensor over an array's memory. The memory is not torch's own, so it never moves."""

    name = "make_foreign"
    weight = 0.5
    sim_only = True

    def draw(self, world: World, rng: Random) -> Arguments | None:
        if len(world.model.memories) >= MEMORIES_MAX:
            return None
        return {"number": world.model.new_number(), "size": rng.choice((4096, 70_000)), "value": rng.randrange(4000)}

    def run(self, world: World, number: int, size: int, value: int) -> None:
        data = device.pattern("noise", value, size)
        array = np.array(data)
        tensor = torch.from_numpy(array)
        memory = Memory(tensor, data, None, tensor.data_ptr(), may_be_lent=True, is_foreign=True)
        memory.partners[number] = array
        world.model.memories[number] = memory


@register
class Adopt(Operation):
    """Calls saver.adopt."""

    name = "adopt"
    weight = 3

    def draw(self, world: World, rng: Random) -> Arguments | None:
        numbers = list(world.model.memories)
        if not numbers:
            return None
        actor = world.draw_actor(rng)
        policy = world.draw_policy(rng)
        return {
            "actor": actor,
            "numbers": rng.sample(numbers, rng.randint(1, min(4, len(numbers)))),
            "through": rng.choice(("tensor", "alias", "list", "holder")),
            "tag": policy[0],
            "backup": policy[1],
            "trouble": world.draw_trouble(rng, actor, []),
        }

    def run(
        self,
        world: World,
        actor: int,
        numbers: list[int],
        through: str,
        tag: str,
        backup: str | None,
        trouble: list[Any] | None,
    ) -> str:
        model = world.model
        chosen = {number: model.memories[number] for number in numbers if number in model.memories}
        objects: list[Any] = [self._object(memory, through) for memory in chosen.values()]
        for other_number, other in model.memories.items():
            if any(memory.holder is not None and memory.holder is other.holder for memory in chosen.values()):
                chosen[other_number] = other
        reached = self._reached(chosen, through, numbers)
        movable = [memory for memory in reached if not memory.may_be_lent]
        policy = Policy(tag, backup)

        def call() -> Any:
            return saver.adopt(*([objects] if through == "list" else objects), tag=tag, backup=backup)

        is_any_away = any(memory.is_away() for memory in movable)
        before = {id(memory): memory.address for memory in reached}
        outcome = ""
        try:
            outcome = Attempt(
                model,
                lambda: world.actors.run(actor, call),
                trouble=trouble,
                refuses=StateError if is_any_away else None,
                comes_first=lambda error: may_enter_fail(world, policy, error),
                may_fail=self._may_fail(world, policy, reached),
                is_doubtful_after=lambda: True,
            ).run()
        finally:
            for memory in reached:
                self._follow(memory, policy)
        if outcome == "done":
            for memory in movable:
                is_there = memory.policy == policy or self._is_in(memory, policy)
                if not is_there:
                    raise Failure(f"a tensor of {memory.size_bytes} bytes was not adopted, and was never lent")
        if is_any_away and trouble is None and any(before[id(memory)] != memory.address for memory in reached):
            raise Failure("a refused adopt moved something")
        if tag in saver.tags():
            model.named.add(tag)
        return outcome

    @staticmethod
    def _may_fail(world: World, policy: Policy, reached: list[Memory]) -> Callable[[BaseException], bool]:
        is_lent_away = any(memory.is_away() for memory in reached if memory.policy is not None)

        def may_fail(error: BaseException) -> bool:
            if isinstance(error, StateError):
                # A lent tensor is skipped, or the call is refused because it is paused: both are right.
                return is_lent_away
            if is_out_of_memory(error):
                return may_enter_fail(world, policy, error) or any(
                    device.room_bytes() < device.segment_bytes(memory.size_bytes) for memory in reached
                )
            return host_may_refuse(world.model)(error)

        return may_fail

    @staticmethod
    def _object(memory: Memory, through: str) -> Any:
        if through == "holder" and memory.holder is not None:
            return memory.holder
        if through == "alias" and memory.aliases:
            return next(iter(memory.aliases.values()))[0]
        return memory.base

    @staticmethod
    def _reached(chosen: dict[int, Memory], through: str, numbers: list[int]) -> list[Memory]:
        return [
            memory
            for number, memory in chosen.items()
            if (number in numbers or (through == "holder" and memory.holder is not None)) and memory.size_bytes
        ]

    @staticmethod
    def _is_in(memory: Memory, policy: Policy) -> bool:
        info = _core.find(memory.address)
        return info is not None and info.tag == policy.tag

    @staticmethod
    def _follow(memory: Memory, policy: Policy) -> None:
        """Updates the model if the memory has moved: it is then resident, in the new tag, with all its views."""
        address = memory.base.data_ptr()
        if address == memory.address:
            return
        if memory.is_lent:
            raise Failure("adopt moved memory that is lent")
        info = _core.find(address)
        if info is None or info.tag != policy.tag:
            raise Failure(f"adopt moved a tensor out of its tag, and not into {policy.tag!r}")
        memory.address, memory.policy = address, policy
        memory.is_paused = memory.is_doubtful = False
        memory.kept = None  # a backup that is retained at its new place shows the bytes from before
        memory.detach()
