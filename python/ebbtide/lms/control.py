"""`ebbtide.lms.enable` and what it turns on."""

import functools
import logging
import os
from types import TracebackType
from typing import Any, Literal, NamedTuple

from ebbtide import _core, driver_choice, logs, settings, torch_extension
from ebbtide.errors import OutOfMemoryError, StateError
from ebbtide.lms import calls, custom_functions, devices, optimizer_states, outside, weights
from ebbtide.lms.devices import CudaDevice, Device, SimulatedDevice
from ebbtide.locks import make_lock
from ebbtide.saver.reclaim import torch_cache
from ebbtide.saver.regions import startup
from ebbtide.sizes import format_size, parse_size
from ebbtide.torch_support import versions
from ebbtide.torch_support.torch_names import find

DEFAULT_MIN_SIZE = 1 << 20

_lock = make_lock()


class _Given(NamedTuple):
    """What `enable` was told, in bytes."""

    limit: int | None = None  # None: "auto"
    min_size: int = DEFAULT_MIN_SIZE
    host_limit: int | None = None
    recompute: calls.Rule = "auto"
    evict: calls.Rule = True
    overflow: bool = True
    plan: calls.Plan | None = None


class _State:
    """What holds, and what `disable` must undo."""

    def __init__(self) -> None:
        self.is_on = False
        self.given = _Given()
        self.allowed: int | None = None  # what the limit means on this device; None: nothing limits
        self.device: Device | None = None  # while LMS is on, or could not be turned off whole


_now = _State()


class Enabled:
    """What `enable` returns. The end of a `with` over it puts back what was before that call: off, or other settings.

    Args:
        given: the settings of the call.
        before: those that it changed; None if it turned LMS on.
    """

    def __init__(self, given: _Given, before: _Given | None) -> None:
        self._given, self._before = given, before

    def __enter__(self) -> "Enabled":
        if not _now.is_on and not driver_choice.is_off():  # turned off since
            self._before = _enable(self._given)._before
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._before is None:
            disable()
            return
        if not _now.is_on:  # turned off inside
            return
        try:
            _enable(self._before)
        except OutOfMemoryError:
            if error is None:
                raise

    def __repr__(self) -> str:
        limit = "auto" if _now.given.limit is None else format_size(_now.given.limit)
        return f"<ebbtide.lms: on, limit {limit}>" if _now.is_on else "<ebbtide.lms: off>"


def enable(
    limit: str | int = "auto",
    min_size: str | int = "1MiB",
    host_limit: str | int | None = None,
    recompute: calls.Rule = "auto",
    evict: calls.Rule = True,
    overflow: bool = True,
    plan: str | os.PathLike[str] | None = None,
) -> Enabled:
    """Turns large model support on, in all threads. If it is on, the call changes the settings.

        ebbtide.lms.enable(limit="1GiB")

    Args:
        limit: the most device memory ("16GiB", or bytes above 2**20) that torch and ebbtide may hold on each device,
            cached memory included. "auto": what is free now and what they hold, less 512 MiB, or less a sixteenth of
            the device where that is less. 0: what is saved for backward leaves as soon as nothing else uses it.
        min_size: tensors with less storage ("1MiB" or bytes) stay on the device.
        host_limit: the most host memory that ebbtide may hold meanwhile, beside the host_limit of `saver.configure`:
            the lower one holds. None: that one alone.
        recompute: which calls of modules may run a second time in backward, in place of keeping or evicting what they
            save, where that is faster. "auto": those that a trial has shown to give the same bits. False: none. A
            function: those modules for which it returns True, after the same trial.
        evict: of which modules what they save for backward may leave. True: of all. False: of none. A function: of
            those for which it returns True, and that lie in no other for which it does not. The rest leaves only where
            an allocation would fail otherwise, as in the first steps, which have no plan.
        overflow: where nothing can leave any more, what is allocated lies on the host, and is said once to do so. The
            device uses it over the bus, which is slow. Not inside a `saver.region`, and not during a capture. False: it
            is an OutOfMemoryError.
        plan: a file of `save_plan`. Steps recompute what it says, and nothing is measured, so that runs decide alike.

    Returns:
        A context manager. At its end LMS is off again if this call turned it on, and has its earlier settings if it
        was on. Without `with`, LMS stays on until `disable()`.

    Raises:
        TypeError, ValueError: malformed sizes, or a file that holds no plan; nothing is changed.
        OSError: the plan can't be read.
        StateError: torch before 2.11 or built with ROCm, a forked child, a transform of torch.func around the call
            that turns LMS on, or a system that does not let a process change torch's tables.
        OutOfMemoryError: more is held than the limit allows, and cannot leave. Nothing is changed.
    """
    least = parse_size(min_size, "min_size")
    host = None if host_limit is None else parse_size(host_limit, "host_limit")
    if recompute not in ("auto", True, False) and not callable(recompute):
        raise TypeError(f"recompute must be 'auto', False, or a function of a module, not {recompute!r}")
    if not isinstance(evict, bool) and not callable(evict):
        raise TypeError(f"evict must be True, False, or a function of a module, not {evict!r}")
    if not isinstance(overflow, bool):
        raise TypeError(f"overflow must be True or False, not {overflow!r}")
    if plan is not None and recompute is False:
        raise ValueError("a plan says what to recompute, and recompute=False forbids it: give one of them")
    forced = None if plan is None or driver_choice.is_off() else calls.read_plan(plan)
    return _enable(_Given(parse_limit(limit), least, host, recompute, evict, overflow, forced))


def _enable(given: _Given) -> Enabled:
    if driver_choice.is_off():
        return Enabled(given, None)
    startup.backend()  # imports torch; under `ebbtide run --lms` that import enables LMS by itself
    with _lock:
        was_off = not _now.is_on
        before = None if was_off else _now.given
        try:
            if was_off:
                _turn_on()
            _apply_device_limit(given.limit)
            if was_off:
                assert _now.device is not None
                _now.device.reset_peaks()  # what was held before is gone
            _core.set_lms_host_limit(_core.UNLIMITED if given.host_limit is None else given.host_limit)
        except BaseException:
            if was_off and was_used():
                _turn_off()
            raise
        _now.given = given
        assert _now.device is not None
        take = functools.partial(devices.take_overflow, _now.device, _extension())
        _extension().set_overflow(take if given.overflow else None)
        _apply_rules()
        calls.allow(given.recompute, given.evict, given.plan)
    if logs.is_enabled():
        logs.log(logging.INFO, "%s", _describe_limits("on" if was_off else "changed", given))
    return Enabled(given, before)


def parse_limit(value: str | int) -> int | None:
    """A limit in bytes; None: "auto".

    Raises:
        ValueError: a number of bytes that can only be meant in another unit.
    """
    limit = None if value == "auto" else parse_size(value, "limit")
    has_unit = isinstance(value, str) and not value.strip().isdecimal()
    if limit and limit <= 1 << 20 and not has_unit:
        advice = f"limit='{limit}GiB'" if limit < 1024 else "limit='16GiB'"
        raise ValueError(f"limit={value!r} is {limit} bytes: give a unit, such as {advice}")
    return limit


def _describe_limits(state: str, given: _Given) -> str:
    limit = "auto" if given.limit is None else format_size(given.limit)
    text = f"lms {state}: limit {limit}, min_size {format_size(given.min_size)}"
    return text if given.host_limit is None else f"{text}, host_limit {format_size(given.host_limit)}"


def _turn_on() -> None:
    backend = startup.backend()
    assert backend is not None
    if driver_choice.is_hip():
        raise StateError(
            "large model support does not work with HIP, where torch's allocator has other names: use regions and "
            "pauses, or torch.utils.checkpoint"
        )
    _check_torch()
    settings.check_environment()
    device = _device_of(backend.device_type)
    extension = _extension()
    if not find("_C._autograd._saved_tensors_hooks_is_enabled")():
        raise StateError(
            "LMS can't be enabled inside a transform of torch.func or disable_saved_tensors_hooks: enable it outside"
        )
    if not extension.follow_saved_tensors():
        raise StateError(
            "LMS can't be enabled: the system does not let a process change torch's table of autograd's functions "
            "(mprotect); allow it for this program"
        )
    custom_functions.follow(extension)
    _now.device = device  # noted first: `disable` ends what an interrupt leaves
    device.attach(extension)
    extension.reset_statistics()
    devices.forget_overflow()
    optimizer_states.install(extension, device)
    weights.install(extension, device)
    calls.install(extension, device.trim)
    _apply_rules()  # what an earlier LMS left on the device may leave for the limit
    if _make_room_for not in torch_cache.makers_of_room:
        torch_cache.makers_of_room.append(_make_room_for)
    _now.is_on = True


def _device_of(kind: str) -> Device:
    return SimulatedDevice() if kind == "cpu" else CudaDevice()


def enable_again() -> None:
    """`lms.enabled = True`: with the limits of the last `enable`."""
    _enable(_now.given)


def disable() -> None:
    """Turns LMS off. What is on the host comes back when backward wants it, into ordinary memory.

        ebbtide.lms.disable()

    From then on every tensor stays where it is.
    """
    with _lock:
        was_on = _now.is_on
        if was_used():
            _turn_off()
    if was_on:
        logs.log(logging.INFO, "lms off")


def _turn_off() -> None:
    """Every step can be done again: an interrupt leaves the rest to the next call."""
    extension = _extension()
    if _make_room_for in torch_cache.makers_of_room:
        torch_cache.makers_of_room.remove(_make_room_for)
    if _now.device is None:
        return
    _now.device.release(extension)
    extension.set_overflow(None)
    extension.set_rules(False, _now.given.min_size, False)
    _core.set_lms_host_limit(_core.UNLIMITED)
    _now.device.detach(extension)
    devices.release_dead_overflow()
    optimizer_states.remove(extension)
    weights.remove(extension)
    calls.remove()
    outside.forget(extension)
    _now.is_on = False
    _now.device = None


def is_enabled() -> bool:
    """Whether LMS is on."""
    return _now.is_on


def limit() -> int | Literal["auto"]:
    """Bytes, as given."""
    return "auto" if _now.given.limit is None else _now.given.limit


def set_limit(value: str | int) -> None:
    """Changes the limit, now or (if LMS is off) for the next `lms.enabled = True`."""
    wanted = parse_limit(value)
    with _lock:
        if _now.is_on:
            _apply_device_limit(wanted)
        else:
            _now.given = _now.given._replace(limit=wanted)


def min_size() -> int:
    """Bytes: what has less storage stays on the device."""
    return _now.given.min_size


def set_min_size(value: str | int) -> None:
    """Changes it for what is saved from now on."""
    least = parse_size(value, "min_size")
    with _lock:
        _now.given = _now.given._replace(min_size=least)
        if _now.is_on:
            _apply_rules()


def held_bytes() -> tuple[int, int]:
    """Device memory that ebbtide holds, of the fullest device, and the most since LMS was turned on."""
    device = _now.device or SimulatedDevice()
    return device.held_bytes(), device.peak_bytes()


def evict(wanted_bytes: int) -> int:
    """Evicts so many bytes of saved tensors, or all that can leave; how many left. For tests and for IBM's names."""
    return int(_extension().evict(wanted_bytes)) if was_used() else 0


def reclaims() -> int:
    """How many allocations had to wait for an eviction since the last `enable` that turned LMS on."""
    return int(_extension().statistics()["reclaims"]) if was_used() else 0


def _check_torch() -> None:
    import torch

    if problem := versions.lms_problem(versions.torch_version(torch.__version__)):
        raise StateError(problem)


def _extension() -> Any:
    return torch_extension.load("_lms")


def was_used() -> bool:
    return _now.is_on or torch_extension.is_loaded("_lms")


def _apply_rules() -> None:
    _extension().set_rules(True, _now.given.min_size, _now.given.limit == 0)


def _apply_device_limit(wanted: int | None) -> None:
    device = _now.device
    assert device is not None
    allowed = device.most_bytes() if wanted is None else wanted or None
    if allowed is not None and device.held_bytes() > allowed:
        _make_room(device, allowed)
        held = device.held_bytes()
        if held > allowed:
            raise OutOfMemoryError(
                f"{format_size(held)} of device memory are held and can't leave, more than the limit of "
                f"{format_size(allowed)}: the limit stays as it was. Free memory, pause a tag, or take a higher limit",
                held - allowed,
                0,
                allowed,
                0,
            )
    _now.given = _now.given._replace(limit=wanted)
    device.set_limit(allowed, is_whole=wanted is None)
    _now.allowed = allowed
    optimizer_states.forget_shortage()
    weights.forget_shortage()
    _apply_rules()


def _make_room(device: Device, allowed_bytes: int) -> None:
    """Evicts until no more is held, or until nothing can leave: what leaves need not free whole segments."""
    torch_cache.give_back()  # also of other tags
    devices.release_dead_overflow()
    device.trim()
    while (held := device.held_bytes()) > allowed_bytes:
        if not evict(held - allowed_bytes) and not _make_room_of_long_lived(held - allowed_bytes):
            return
        device.trim()


def _make_room_for(error: OutOfMemoryError) -> bool:
    """A tag comes back, and found no room."""
    device, allowed = _now.device, _now.allowed
    if device is None or allowed is None:
        return False
    _make_room(device, max(0, allowed - error.requested_bytes))
    return True


def _make_room_of_long_lived(wanted_bytes: int) -> int:
    extension = _extension()
    if freed := extension.make_room_of_states(wanted_bytes):
        return int(freed)
    return sum(extension.make_room_of_weights(device, wanted_bytes) for device in range(_core.device_count()))
