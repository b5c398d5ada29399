"""saver.backup_of: views are taken, compared, written and dropped, at any time."""

from random import Random
from typing import Any

import numpy as np
import torch
from ebbtide import saver
from ebbtide.errors import StateError

from .. import device
from ..attempt import Attempt, host_may_refuse
from ..model import Failure, Memory, Skip, Stored, View
from ..world import World
from . import Arguments, Operation, register

VIEWS_MAX = 6


def _has_none(memory: Memory, error: BaseException) -> bool:
    """Whether it is right to say that nothing backs the memory up."""
    is_without = memory.policy is None or memory.is_dropped or memory.may_be_zero
    return isinstance(error, StateError) and is_without


@register
class Look(Operation):
    """Calls backup_of for a memory, or for a part of it."""

    name = "look"
    weight = 7

    def draw(self, world: World, rng: Random) -> Arguments | None:
        number = world.draw_memory(rng, is_paused=rng.random() < 0.9)
        if number is None or len(world.model.views) >= VIEWS_MAX:
            return None
        size = world.model.memories[number].size_bytes
        begin, end = sorted(rng.randrange(size + 1) for _ in range(2))
        return {
            "number": number,
            "view": world.model.new_number(),
            "actor": world.draw_actor(rng),
            "begin": 0 if rng.random() < 0.5 else begin,
            "end": end,
            "step": rng.choice((1, 1, 2, 7)),
            "writable": rng.random() < 0.4,
            "trouble": world.draw_trouble(rng, 1, []),
        }

    def run(
        self,
        world: World,
        number: int,
        view: int,
        actor: int,
        begin: int,
        end: int,
        step: int,
        writable: bool,
        trouble: list[Any] | None,
    ) -> str:
        memory = world.model.memory(number)
        part = memory.base[begin:end:step]

        def effect(tensor: torch.Tensor | None) -> None:
            if tensor is None:
                return self._check_none(memory, part)
            if memory.policy is None or not memory.is_paused:
                raise Failure("backup_of gave the bytes of a resident tensor")
            return self._keep(world, number, view, memory, tensor, (begin, end, step))

        def may_fail(error: BaseException) -> bool:
            is_split = isinstance(error, StateError) and memory.has_spilled
            return is_split or _has_none(memory, error) or memory.is_doubtful or host_may_refuse(world.model)(error)

        return Attempt(
            world.model,
            lambda: world.actors.run(actor, lambda: saver.backup_of(part, writable)),
            effect,
            trouble=trouble,
            may_fail=may_fail,
        ).run()

    @staticmethod
    def _check_none(memory: Memory, part: torch.Tensor) -> None:
        """None is right for memory that is resident or empty."""
        if memory.is_dropped and part.numel() and not memory.is_doubtful:
            raise Failure("backup_of does not say that the memory was dropped")
        if not memory.is_paused or memory.may_be_zero or memory.is_doubtful or not part.numel():
            return
        if memory.has_spilled:
            return
        if memory.expected.any():
            raise Failure("backup_of knows nothing of bytes that come back")

    @staticmethod
    def _keep(
        world: World,
        number: int,
        view: int,
        memory: Memory,
        tensor: torch.Tensor,
        part: tuple[int, int, int],
    ) -> None:
        begin, end, step = part
        found, wanted = tensor.numpy(), memory.expected[begin:end:step]
        if not np.array_equal(found, wanted) and not (memory.may_be_zero or memory.is_doubtful):
            raise Failure("backup_of shows other bytes than those that were paused")
        if memory.may_be_zero or memory.is_doubtful:
            return
        if memory.stored is None:
            memory.stored = Stored(memory.expected)  # one object for all views, until the resume
        if step == 1 and end > begin:
            world.model.views[view] = View(tensor, number, memory.stored, begin, end - begin)


@register
class LookAtRetained(Operation):
    """Calls backup_of(retained=True) for a part of a memory, resident or not, and drops the view."""

    name = "look_at_retained"
    weight = 5

    def draw(self, world: World, rng: Random) -> Arguments | None:
        number = world.draw_memory(rng, is_paused=rng.random() < 0.3)
        if number is None:
            return None
        begin, end = sorted(rng.randrange(world.model.memories[number].size_bytes + 1) for _ in range(2))
        return {
            "number": number,
            "actor": world.draw_actor(rng),
            "begin": begin,
            "end": end,
            "trouble": world.draw_trouble(rng, 1, []),
        }

    def run(self, world: World, number: int, actor: int, begin: int, end: int, trouble: list[Any] | None) -> str:
        memory = world.model.memory(number)
        part = memory.base[begin:end]

        def effect(tensor: torch.Tensor | None) -> None:
            if tensor is None or memory.is_doubtful or memory.may_be_zero:
                return
            wanted = memory.expected if memory.is_paused else memory.kept
            if wanted is not None and not np.array_equal(tensor.numpy(), wanted[begin:end]):
                raise Failure("backup_of(retained=True) shows other bytes than those that were paused last")

        def may_fail(error: BaseException) -> bool:
            is_split = isinstance(error, StateError) and memory.has_spilled
            return is_split or _has_none(memory, error) or memory.is_doubtful or host_may_refuse(world.model)(error)

        return Attempt(
            world.model,
            lambda: world.actors.run(actor, lambda: saver.backup_of(part, retained=True)),
            effect,
            trouble=trouble,
            may_fail=may_fail,
        ).run()


@register
class WriteBackup(Operation):
    """Writes through a view, whether or not it was requested as writable. Bytes written before the resume come
    back."""

    name = "write_backup"
    weight = 3

    def draw(self, world: World, rng: Random) -> Arguments | None:
        if not world.model.views:
            return None
        number = rng.choice(list(world.model.views))
        begin, end = sorted(rng.randrange(world.model.views[number].length + 1) for _ in range(2))
        return {
            "number": number,
            "begin": begin,
            "end": end,
            "through": rng.choice(("copy_", "fill_", "numpy", "view")),
            "value": rng.randrange(256),
        }

    def run(self, world: World, number: int, begin: int, end: int, through: str, value: int) -> None:
        if number not in world.model.views:
            raise Skip
        view = world.model.views[number]
        target = view.tensor[begin:end]
        data = device.pattern("constant" if through == "fill_" else "noise", value, end - begin)
        if through == "fill_":
            target.fill_(value)
        elif through == "numpy":
            target.numpy()[:] = data
        elif through == "view":
            target.view(-1).copy_(torch.from_numpy(data))
        else:
            target.copy_(torch.from_numpy(data))
        view.stored.bytes[view.offset + begin : view.offset + end] = data


@register
class DropView(Operation):
    """Drops a view."""

    name = "drop_view"
    weight = 4

    def draw(self, world: World, rng: Random) -> Arguments | None:
        views = list(world.model.views)
        return {"number": rng.choice(views), "actor": world.draw_actor(rng)} if views else None

    def run(self, world: World, number: int, actor: int) -> None:
        if number not in world.model.views:
            raise Skip
        kept = [world.model.views.pop(number)]
        world.actors.run(actor, kept.clear)
