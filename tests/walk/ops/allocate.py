"""Tensors: made (in the open region or in one of their own), written, viewed, lent, and freed."""

from random import Random
from typing import Any

import torch
from ebbtide import _core, saver
from ebbtide.errors import OutOfMemoryError

from .. import device
from ..attempt import Attempt, host_may_refuse
from ..device import MIB
from ..model import Failure, Memory, Policy, Skip
from ..world import World
from . import Arguments, Operation, register

MEMORIES_MAX = 16
SIZES = (
    *(512, 4096, 70_000, 70_000, 300_000, 300_000, 600_000, 600_000, 900_000, MIB),
    *(512, 4096, 70_000, 70_000, 300_000, 300_000, 600_000, 600_000, 900_000, MIB),
    *(1_200_000, 3 * MIB, 10 * MIB, 11 * MIB),
)
BIG_SIZES = (12 * MIB, 20 * MIB, 33 * MIB)
KINDS = ("noise", "noise", "constant", "blocks")


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError | OutOfMemoryError)


def make_memory(world: World, actor: int, size: int, kind: str, value: int) -> Memory:
    """Makes a tensor of bytes with this content and its entry in the model, and checks both."""
    policy = world.model.routes.policy(actor)
    tensor = torch.empty(size, dtype=torch.uint8, device=saver.device)
    memory = Memory(tensor, device.pattern(kind, value, size), policy, tensor.data_ptr())
    info = _core.find(memory.address)
    tag = None if info is None else info.tag
    if tag != memory.tag:
        raise Failure(f"a tensor that should have the tag {memory.tag!r} has {tag!r}")
    if memory.is_away():
        raise Failure("a new tensor has no memory behind it")
    device.write(tensor, memory.expected)
    return memory


def may_be_out_of_memory(size: int, policy: Policy | None) -> Any:
    """An out-of-memory error must be true: there is no room for the segment that torch would request."""

    def may(error: BaseException) -> bool:
        if not is_out_of_memory(error):
            return False
        room = device.room_bytes(policy is not None and policy.overflow is not None)
        if room >= device.segment_bytes(size):
            raise Failure(f"out of memory for {size} bytes, and there is room for {room}") from error
        return True

    return may


@register
class Allocate(Operation):
    """Makes a tensor in the innermost scope of the actor's thread."""

    name = "allocate"
    weight = 10

    def draw(self, world: World, rng: Random) -> Arguments | None:
        if len(world.model.memories) >= MEMORIES_MAX:
            return None
        actor = world.draw_actor(rng)
        policy = world.model.routes.policy(actor)
        may_spill = policy is not None and policy.overflow
        size = rng.choice(BIG_SIZES if may_spill and rng.random() < 0.25 else SIZES)
        return {
            "number": world.model.new_number(),
            "actor": actor,
            "size": size,
            "kind": rng.choice(KINDS),
            "value": rng.randrange(1, 4000),
            "trouble": world.draw_trouble(rng, 1, []),
        }

    def run(
        self, world: World, number: int, actor: int, size: int, kind: str, value: int, trouble: list[Any] | None
    ) -> str:
        def call() -> Memory:
            return world.actors.run(actor, lambda: make_memory(world, actor, size, kind, value))

        def effect(memory: Memory) -> None:
            world.model.memories[number] = memory

        may_fail = may_be_out_of_memory(size, world.model.routes.policy(actor))
        return Attempt(world.model, call, effect, trouble=trouble, may_fail=may_fail).run()


@register
class AllocateInRegion(Operation):
    """A whole `with saver.region(...)` with one tensor in it, perhaps interrupted."""

    name = "allocate_in_region"
    weight = 16

    def draw(self, world: World, rng: Random) -> Arguments | None:
        if len(world.model.memories) >= MEMORIES_MAX:
            return None
        actor = world.draw_actor(rng)
        policy = world.draw_policy(rng)
        size = rng.choice(BIG_SIZES if policy[3] and rng.random() < 0.25 else SIZES)
        trouble = world.draw_trouble(rng, actor, [])
        if trouble and trouble[0] == "interrupt" and world.model.routes.is_for_all_threads():
            # The newest region would depend on whether the interrupted call entered the thread's other regions anew.
            trouble = None
        return {
            "number": world.model.new_number(),
            "actor": actor,
            "policy": policy,
            "size": size,
            "kind": rng.choice(KINDS),
            "value": rng.randrange(1, 4000),
            "style": rng.choice(("with", "with", "function", "disabled")),
            "trouble": trouble,
        }

    def run(self, world: World, number: int, actor: int, style: str, policy: list[Any], **rest: Any) -> str:
        model = world.model
        region = Policy(*policy)
        trouble = rest.pop("trouble")
        leases = {tag: status.lease_count for tag, status in saver.tags().items()}

        has_entered: list[bool] = []

        def make() -> Memory:
            has_entered.append(True)
            tensor = torch.empty(rest["size"], dtype=torch.uint8, device=saver.device)
            data = device.pattern(rest["kind"], rest["value"], rest["size"])
            device.write(tensor, data)
            return Memory(tensor, data, None if style == "disabled" else region, tensor.data_ptr())

        def inside() -> Memory:
            if style == "function":
                return world.make_region(region)(make)()
            if style == "disabled":
                with world.make_region(region), saver.disabled():
                    return make()
            with world.make_region(region):
                return make()

        def effect(memory: Memory) -> None:
            model.named.add(region.tag)
            info = _core.find(memory.address)
            found = None if info is None else info.tag
            if found != memory.tag:
                raise Failure(f"a tensor of {memory.tag!r} has the tag {found!r}")
            model.memories[number] = memory

        outcome = Attempt(
            model,
            lambda: world.actors.run(actor, inside),
            effect,
            trouble=trouble,
            may_fail=lambda error: (
                may_enter_fail(world, region, error) or may_be_out_of_memory(rest["size"], region)(error)
            ),
        ).run()
        if has_entered:
            model.routes.visit(actor, region, is_disabled=style == "disabled")
        for tag, status in saver.tags().items():
            model.named |= {tag} if tag.startswith(world.prefix) else set()
            if status.lease_count != leases.get(tag, 0):
                raise Failure(f"a region of {tag!r} is open that was left ({outcome})")
        return outcome


def may_enter_fail(world: World, policy: Policy, error: BaseException) -> bool:
    """Entering a region brings trimmed memory back, or fails. Memory that lay on the host may need the host again."""
    if host_may_refuse(world.model)(error):
        return True
    if not isinstance(error, OutOfMemoryError):
        return False
    status = saver.tags().get(policy.tag)
    if status is None or not status.trimmed_bytes:
        return False
    return device.room_bytes() < status.trimmed_bytes


@register
class Write(Operation):
    """Writes new content to the whole or a part, through the tensor, a view of it or a partner."""

    name = "write"
    weight = 8

    def draw(self, world: World, rng: Random) -> Arguments | None:
        number = world.draw_memory(rng, is_paused=False)
        if number is None:
            return None
        memory = world.model.memories[number]
        begin, end = sorted(rng.randrange(memory.size_bytes + 1) for _ in range(2))
        if rng.random() < 0.4:
            begin, end = 0, memory.size_bytes
        through = rng.choice(["base", *memory.aliases, *memory.partners])
        kind = rng.choice(KINDS)
        return {
            "number": number,
            "begin": begin,
            "end": end,
            "through": through,
            "kind": kind,
            "value": rng.randrange(4000),
        }

    def run(self, world: World, number: int, begin: int, end: int, through: Any, kind: str, value: int) -> None:
        memory = world.model.memory(number)
        if memory.is_paused:
            raise Skip
        target, offset = memory.base, 0
        if through in memory.aliases:
            target, offset = memory.aliases[through]
        elif through in memory.partners:
            target = memory.partners[through]
        begin, end = max(0, begin - offset), min(end - offset, len(target))
        if end <= begin:
            return
        data = device.pattern(kind, value, end - begin)
        memory.expected[begin + offset : end + offset] = data
        if isinstance(target, torch.Tensor):
            device.write(target.detach()[begin:end], data)
        else:
            target[begin:end] = data


@register
class Alias(Operation):
    """Makes a view of a memory: another tensor of the same storage."""

    name = "alias"
    weight = 2

    def draw(self, world: World, rng: Random) -> Arguments | None:
        number = world.draw_memory(rng)
        if number is None or len(world.model.memories[number].aliases) > 2:
            return None
        begin, end = sorted(rng.randrange(world.model.memories[number].size_bytes + 1) for _ in range(2))
        return {"number": number, "alias": world.model.new_number(), "begin": begin, "end": end}

    def run(self, world: World, number: int, alias: int, begin: int, end: int) -> None:
        memory = world.model.memory(number)
        memory.aliases[alias] = (memory.base[begin:end], begin)


@register
class Lend(Operation):
    """Makes a partner that knows the memory by its address, through DLPack or (without a GPU) NumPy."""

    name = "lend"
    weight = 2

    def draw(self, world: World, rng: Random) -> Arguments | None:
        number = world.draw_memory(rng, is_paused=False)
        if number is None:
            return None
        how = rng.choice(("dlpack", "numpy") if device.IS_SIM else ("dlpack",))
        return {"number": number, "partner": world.model.new_number(), "how": how}

    def run(self, world: World, number: int, partner: int, how: str) -> None:
        memory = world.model.memory(number)
        if memory.is_paused:
            raise Skip
        memory.may_be_lent = True
        memory.partners[partner] = torch.from_dlpack(memory.base) if how == "dlpack" else memory.base.numpy()


@register
class Return(Operation):
    """Drops views and partners. The memory stays."""

    name = "return"
    weight = 2

    def draw(self, world: World, rng: Random) -> Arguments | None:
        number = world.draw_memory(rng)
        if number is None:
            return None
        memory = world.model.memories[number]
        others = [*memory.aliases, *memory.partners]
        return {"number": number, "other": rng.choice(others)} if others and not memory.is_foreign else None

    def run(self, world: World, number: int, other: int) -> None:
        memory = world.model.memory(number)
        if memory.aliases.pop(other, None) is None and memory.partners.pop(other, None) is None:
            raise Skip


@register
class Free(Operation):
    """Drops the last reference, in whatever thread and state. Views of its backup live on."""

    name = "free"
    weight = 9

    def draw(self, world: World, rng: Random) -> Arguments | None:
        number = world.draw_memory(rng)
        return None if number is None else {"number": number, "actor": world.draw_actor(rng)}

    def run(self, world: World, number: int, actor: int) -> None:
        holder = world.model.memory(number).holder
        mates = [
            other for other, memory in world.model.memories.items() if holder is not None and memory.holder is holder
        ]
        del holder
        kept = [world.forget(other) for other in dict.fromkeys([number, *mates])]  # a module dies as a whole
        world.actors.run(actor, kept.clear)
