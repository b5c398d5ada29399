"""Checks that hold after each step, and at the end of a walk. Each raises Failure."""

import gc
import time
from typing import Any

from ebbtide import _core, saver

from . import device
from .model import Failure, Memory
from .ops.moves import resume_all
from .world import World

THOROUGH_EVERY = 4  # steps: comparing all bytes takes longer than most steps


def check_step(world: World) -> None:
    """After each step: every address, every byte that may be read, every tag and every sum."""
    world.checks += 1
    is_thorough = world.checks % THOROUGH_EVERY == 0
    for number, memory in world.model.memories.items():
        try:
            _check_memory(memory, is_thorough)
            if is_thorough and memory.size_bytes:
                _check_where(memory)
        except Failure as failure:
            raise Failure(f"memory {number} of {memory.tag!r}: {failure}") from None
    for number, view in world.model.views.items():
        wanted = view.stored.bytes[view.offset : view.offset + view.length]
        if not (view.tensor.numpy() == wanted).all():
            raise Failure(f"view {number} shows other bytes than it did")
    _check_tags(world)
    _check_hooks(world)
    if world.unraisable:
        raise Failure(f"an exception that nobody could catch: {world.unraisable[0]}")


def _check_memory(memory: Memory, is_thorough: bool) -> None:
    if memory.base.data_ptr() != memory.address:
        raise Failure(f"its address was {memory.address:#x} and is {memory.base.data_ptr():#x}")
    for alias, offset in memory.aliases.values():
        if alias.numel() and alias.data_ptr() != memory.address + offset:
            raise Failure("a view of it lies elsewhere")
    if memory.policy is not None:
        is_away = memory.is_away()
        # Memory on the host stays where it is in a pause, so it may look resident.
        if is_away and not memory.is_paused:
            raise Failure("it is away, and nobody paused it")
        if memory.is_paused and not is_away and not memory.has_spilled:
            raise Failure("it is resident, and nobody resumed it")
    if memory.is_paused:
        return
    if memory.may_be_zero:
        memory.settle_zeros()
    if not device.holds(memory.base, memory.expected, is_thorough):
        found = device.read(memory.base)
        wrong = (found != memory.expected).nonzero()[0]
        zeros = "zeros" if not found[wrong].any() else "other bytes"
        raise Failure(f"{len(wrong)} of {memory.size_bytes} bytes are wrong, from {wrong[0]} on: {zeros}")


def _check_where(memory: Memory) -> None:
    found = saver.where(memory.base)
    here, away = found.device_bytes + found.host_bytes, found.stored_bytes + found.dropped_bytes
    is_right = here + away + found.outside_bytes == memory.size_bytes and found.tag == memory.tag
    if is_right and not memory.is_doubtful:
        is_right = not (found.device_bytes if memory.is_paused else away)
        is_right &= bool(found.outside_bytes) == (memory.tag is None)
        is_right &= not (memory.is_paused and memory.is_dropped and found.stored_bytes)
    if not is_right:
        raise Failure(f"where gave {found} for {memory.size_bytes} bytes, and is_paused is {memory.is_paused}")


def _check_tags(world: World) -> None:
    leases: dict[str, int] = {}
    for scopes in world.model.routes.scopes:
        for scope in scopes:
            if scope.policy is not None:
                leases[scope.policy.tag] = leases.get(scope.policy.tag, 0) + 1
    table = saver.tags()
    for tag, status in table.items():
        if not tag.startswith(f"{world.prefix}-"):
            continue
        if status.lease_count != leases.get(tag, 0):
            raise Failure(f"{tag!r} has {status.lease_count} regions open, and should have {leases.get(tag, 0)}")
        away = status.stored_bytes + status.dropped_bytes + status.detached_bytes
        parts = status.resident_bytes + away + status.trimmed_bytes
        if parts != status.size_bytes:
            raise Failure(f"{tag!r} has {status.size_bytes} bytes, and its parts are {parts}")
        if status.state == "resident" and away:
            raise Failure(f"{tag!r} is called resident: {status}")
    stats = saver.stats()
    resident = sum(status.resident_bytes - status.host_bytes for status in table.values())
    if stats["device_bytes"] < resident:
        raise Failure(f"the tags hold {resident} bytes on the device, and all in all it is {stats['device_bytes']}")
    if world.simulator is not None:
        # This may be more than the tags have: dead memory behind a shared handle is released with its neighbours.
        live, counted = world.simulator.live()["device_bytes"], _core.query_device(0).held_bytes
        if live != counted:
            raise Failure(f"the driver holds {live} bytes of the device, and ebbtide counts {counted}")


def _check_hooks(world: World) -> None:
    """Each before-hook that ran was followed by an after-hook, unless its tag is partial."""
    open_moves: dict[tuple[int, str], str] = {}
    for number, event, tag in world.calls_of_hooks:
        if event.startswith("before"):
            open_moves[number, tag] = event
        else:
            open_moves.pop((number, tag), None)
    world.calls_of_hooks.clear()
    table = saver.tags()
    for (_, tag), event in open_moves.items():
        if event == "before_resume" and world.last_step == "resume_behind":
            continue  # the wait() of its Pending runs the after-hooks
        if table[tag].state != "partial" and not world.was_interrupted:
            raise Failure(f"a {event} hook of {tag!r} ran, and no hook afterwards")


def set_room_free(world: World) -> None:
    """Makes the device large and empty of other processes' memory."""
    if world.simulator is not None:
        world.simulator.clear_failures()
        world.simulator.set_foreign_bytes(0)
        world.simulator.set_capacity(device.LARGE_CAPACITY)
    saver.configure(device_limit=None)


def end(world: World) -> None:
    """Everything is released: nothing is open, nothing is held."""
    model = world.model
    set_room_free(world)
    world.close_all()
    model.pendings.clear()
    if not world.ends_paused:
        saver.resume()
        resume_all(world, [])
    world.checks = -1  # makes the next check thorough
    check_step(world)
    model.memories.clear()
    model.views.clear()
    for remove in [remove for removers in model.hooks.values() for remove in removers]:
        remove()
    model.hooks.clear()
    gc.collect()
    saver.trim()
    ours = {tag: status for tag, status in saver.tags().items() if tag.startswith(f"{world.prefix}-")}
    left = {tag: status for tag, status in ours.items() if _is_left(status)}
    if left:
        raise Failure(f"something is left of {left}")


def _is_left(status: saver.TagStatus) -> bool:
    away = status.stored_bytes + status.dropped_bytes + status.detached_bytes
    return bool(status.resident_bytes or status.lease_count or away)


def check_leaks(before: dict[str, Any], waits_may_fail: bool) -> None:
    """Walks leave nothing in the process except its first use of the device."""
    if waits_may_fail:
        # Memory that a copy may still reach, and that could not be waited for, is kept for ever.
        del before["host bytes"]
    deadline = time.monotonic() + 10
    while True:  # files of the disk store are closed in the background
        now = device.resources()
        grown = {
            name: (before[name], now[name]) for name in before if now[name] > before[name] + device.SLACK.get(name, 0)
        }
        if not grown or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    if grown:
        raise Failure(f"more is held than before the walks: {grown}; {saver.stats()}")
