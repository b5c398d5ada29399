"""saver.configure: limits that make operations fail for lack of room, and switches. Also other processes on the
device."""

from random import Random
from typing import Any

from ebbtide import _core, saver
from ebbtide.errors import StoreError

from ..device import CAPACITY, LARGE_CAPACITY, MIB
from ..model import Failure
from ..world import World
from . import Arguments, Operation, register

SIZES = (0, MIB, 3 * MIB, 8 * MIB, 30 * MIB, 100 * MIB)
SWITCHES = ("skip_clean", "skip_unused", "skip_constant", "poison", "copy_ahead")


@register
class Configure(Operation):
    """Sets one limit or switch."""

    name = "configure"
    weight = 4

    def draw(self, world: World, rng: Random) -> Arguments | None:
        what = rng.choice(
            (
                "device_limit",
                "host_limit",
                "pinned_limit",
                "host_margin",
                "reserve",
                "host_pool",
                "shared_handle",
                "disk_files",
                "switch",
            )
        )
        stats = saver.stats()
        if what == "switch":
            return {"options": {rng.choice(SWITCHES): rng.random() < 0.5}}
        extra = rng.choice(SIZES)
        if what == "disk_files":
            return {"options": {what: rng.choice(("hidden", "named"))}}
        values: dict[str, Any] = {
            "device_limit": stats["device_bytes"] + extra,
            "host_limit": stats["host_held_bytes"] + extra,
            "pinned_limit": stats["pinned_bytes"] + extra,
            "host_margin": rng.choice((0, 64 * MIB)),
            "reserve": rng.choice((None, 0, MIB, 16 * MIB)),
            "host_pool": rng.choice((0, 8 * MIB, 70 * MIB)),
            "shared_handle": rng.choice((0, 2 * MIB, 24 * MIB, 1024 * MIB)),
        }
        return {"options": {what: values[what]}}

    def run(self, world: World, options: dict[str, Any]) -> str:
        world.model.limits.update(options)
        try:
            saver.configure(**options)
        except StoreError:
            if "host_pool" not in options:
                raise Failure("only host_pool takes memory") from None
            return "refused: StoreError"
        for name, value in options.items():
            if name in SWITCHES and (_core.get_setting(name) == b"1") != value:
                raise Failure(f"{name} is not what it was set to")
        return "done"


DEFAULTS = {
    "host_limit": None,
    "pinned_limit": None,
    "host_margin": 64 * MIB,
    "reserve": None,
    "host_pool": 0,
    "shared_handle": "1GiB",
    "skip_clean": True,
    "skip_unused": True,
    "skip_constant": True,
    "poison": False,
    "copy_ahead": False,
    "disk_files": "hidden",
}


def set_defaults(world: World) -> None:
    """Resets all limits and switches, except the one that bounds the device."""
    world.model.limits.clear()
    device_limit = CAPACITY if world.is_bound_by_limit else None
    saver.configure(device_limit=device_limit, **DEFAULTS)  # type: ignore[arg-type]


@register
class Relax(Operation):
    """Resets all limits and switches."""

    name = "relax"
    weight = 4

    def draw(self, world: World, rng: Random) -> Arguments | None:
        return {} if world.model.limits else None

    def run(self, world: World) -> None:
        set_defaults(world)


@register
class Bound(Operation):
    """Changes what makes the device small: its own size, or device_limit on a large device, as on a GPU."""

    name = "bound"
    weight = 0.5
    sim_only = True

    def draw(self, world: World, rng: Random) -> Arguments | None:
        return {"by_limit": not world.is_bound_by_limit}

    def run(self, world: World, by_limit: bool) -> None:
        assert world.simulator is not None
        world.is_bound_by_limit = by_limit
        world.model.foreign_bytes = 0  # other processes never hold more than the device has
        world.simulator.set_foreign_bytes(0)
        world.simulator.set_capacity(LARGE_CAPACITY if by_limit else CAPACITY)
        saver.configure(device_limit=CAPACITY if by_limit else None)


@register
class TakeDevice(Operation):
    """Another process takes device memory, or releases it."""

    name = "take_device"
    weight = 3
    sim_only = True

    def draw(self, world: World, rng: Random) -> Arguments | None:
        free = _core.query_device(0).free_bytes
        taken = world.model.foreign_bytes
        return {"size": 0 if taken and rng.random() < 0.6 else taken + int(free * rng.choice((0.2, 0.7, 0.95, 1.0)))}

    def run(self, world: World, size: int) -> None:
        assert world.simulator is not None
        # In a shorter walk, there may be less room than there was.
        size = min(size, world.model.foreign_bytes + _core.query_device(0).free_bytes)
        world.model.foreign_bytes = size
        world.simulator.set_foreign_bytes(size)
