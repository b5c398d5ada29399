"""`ebbtide.lms.enable` and what it turns on."""

from types import TracebackType
from typing import Any

from ebbtide import _core, driver_choice, settings, torch_extension
from ebbtide.errors import OutOfMemoryError, StateError
from ebbtide.lms import optimizer_states, saved_tensors
from ebbtide.locks import make_lock
from ebbtide.saver.operations.configuration import configure
from ebbtide.saver.pools.region_pools import registry
from ebbtide.saver.regions import entry, startup
from ebbtide.saver.values.arguments import backup_code
from ebbtide.sizes import format_size, parse_size

TAG = "lms"
DEFAULT_MIN_SIZE = 1 << 20
_RESERVE_BYTES = 512 << 20  # what a limit of None leaves free, or a sixteenth of the device where that is less
_LIMITS = ("device_limit", "host_limit")

_lock = make_lock()


class _Settings:
    """What `enable` was told, and what it must undo."""

    def __init__(self) -> None:
        self.is_on = False
        self.limit: int | None = None
        self.min_size = DEFAULT_MIN_SIZE
        self.host_limit: int | None = None
        self.frame: _core.Frame | None = None
        self.changed: dict[str, tuple[int, int]] = {}  # limits of ebbtide: what each was, and what LMS made it


_now = _Settings()


class Enabled:
    """What `enable` returns. The end of a `with` over it disables LMS, if that call turned it on."""

    def __init__(self, turned_on: bool) -> None:
        self._turned_on = turned_on

    def __enter__(self) -> "Enabled":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._turned_on:
            disable()

    def __repr__(self) -> str:
        limit = "the device" if _now.limit is None else format_size(_now.limit)
        return f"<ebbtide.lms: on, limit {limit}>" if _now.is_on else "<ebbtide.lms: off>"


def enable(
    limit: str | int | None = None, min_size: str | int = "1MiB", host_limit: str | int | None = None
) -> Enabled:
    """Turns large model support on, in this thread and in each that is started from now on. If it is on, the call
    changes the settings, which all threads share, and covers this thread if it was not covered yet.

    Args:
        limit: the most device memory ("16GiB" or bytes) that torch and ebbtide may hold on each device, cached memory
            included. None: the device's memory less 512 MiB, or less a sixteenth where that is less. 0: what is saved
            for backward leaves as soon as nothing else uses it.
        min_size: tensors with less storage ("1MiB" or bytes) stay on the device.
        host_limit: the most host memory that ebbtide may hold meanwhile; None: as `saver.configure` has it.

    Returns:
        A context manager that disables LMS at its end if this call turned it on. Without `with`, LMS stays on until
        `disable()`.

    Raises:
        TypeError, ValueError: malformed sizes; nothing is changed.
        StateError: no device that LMS supports (a GPU is not supported yet), a forked child, or a transform of
            torch.func or other saved-tensor hooks around the call.
        OutOfMemoryError: more is held than the limit allows, and cannot leave. Nothing is changed.
    """
    wanted = None if limit is None else parse_size(limit, "limit")
    least = parse_size(min_size, "min_size")
    host = None if host_limit is None else parse_size(host_limit, "host_limit")
    if driver_choice.is_off():
        return Enabled(False)
    startup.backend()  # imports torch; under `ebbtide run --lms` that import enables LMS by itself
    with _lock:
        was_off = not _now.is_on
        try:
            if was_off:
                _turn_on()
            else:
                saved_tensors.install(_extension())
            _apply_device_limit(wanted)
            _apply_limit("host_limit", host)
        except BaseException:
            if was_off and _was_used():
                _turn_off()
            raise
        _now.min_size, _now.host_limit = least, host
        _apply_rules()
    return Enabled(was_off)


def _turn_on() -> None:
    backend = startup.backend()
    assert backend is not None
    if backend.device_type != "cpu":
        raise StateError("large model support runs on the simulated device only, so far: set EBBTIDE_DRIVER=sim")
    settings.check_environment()
    extension = _extension()
    allocator = torch_extension.load()
    saved_tensors.install(extension)
    _now.frame = _core.Frame()  # noted first, so that an interrupt leaves nothing that `disable` does not end
    entry.prepare_region(_now.frame, entry.RegionPolicy(TAG, backup_code("ram"), False), takes_all_threads=True)
    _now.frame.push()
    open_pools = [pool for pool in registry.pools(TAG) if pool.is_leased]
    allocator.set_pool_apart(open_pools[0].handle)
    extension.set_hooks(*allocator.lms_functions())
    allocator.set_reclaimer(*extension.reclaim_functions())
    saved_tensors.follow_threads(extension)
    extension.reset_statistics()
    _core.reset_peaks()
    optimizer_states.install(extension, _trim)
    _apply_rules()  # what an earlier LMS left on the device may leave for the limit
    _now.is_on = True


def enable_again() -> None:
    """`lms.enabled = True`: with the limits of the last `enable`."""
    enable(_now.limit, _now.min_size, _now.host_limit)


def disable() -> None:
    """Turns LMS off. What is on the host comes back when backward wants it, into ordinary memory.

    torch's hooks of this thread go, if no others lie above them. Those of other threads stay, and leave every tensor
    where it is, until that thread calls this too, or ends.
    """
    with _lock:
        if _was_used():
            _turn_off()


def _turn_off() -> None:
    """Every step can be done again: an interrupt leaves the rest to the next call."""
    extension, allocator = _extension(), torch_extension.load()
    saved_tensors.remove(extension)
    if _now.frame is None:
        return
    extension.set_rules(False, _now.min_size, False)
    saved_tensors.leave_threads()
    allocator.set_reclaimer(0, 0)
    for name in _LIMITS:
        _restore(name)
    _now.frame.close()
    allocator.set_pool_apart(0)
    _trim()
    optimizer_states.remove(extension)
    _now.is_on = False
    _now.frame = None


def is_enabled() -> bool:
    """Whether LMS is on."""
    return _now.is_on


def limit() -> int | None:
    """Bytes, as given; None: the device decides."""
    return _now.limit


def set_limit(value: str | int | None) -> None:
    """Changes the limit, now or (if LMS is off) for the next `lms.enabled = True`."""
    wanted = None if value is None else parse_size(value, "limit")
    with _lock:
        if _now.is_on:
            _apply_device_limit(wanted)
        else:
            _now.limit = wanted


def min_size() -> int:
    """Bytes: what has less storage stays on the device."""
    return _now.min_size


def set_min_size(value: str | int) -> None:
    """Changes it for what is saved from now on."""
    least = parse_size(value, "min_size")
    with _lock:
        _now.min_size = least
        if _now.is_on:
            _apply_rules()


def stats() -> dict[str, int | float]:
    """Counters since the last `enable` that turned LMS on, and what is held now, in bytes.

    device_bytes and peak_device_bytes: device memory that ebbtide holds, of the fullest device. evictions,
    evicted_bytes, loaded_bytes: storages that left, and bytes that left and came back. waited_seconds: copies that a
    thread waited for; hidden_seconds: copies beside other work. prefetch_hits, prefetch_late: loads that were, or were
    not, complete when their tensor was wanted. host_bytes: evicted bytes on the host now. state_evicted_bytes,
    state_loaded_bytes, state_host_bytes: the same of optimizer states, which the counters before leave out. slow_reads:
    optimizer steps that found states on the host, and read them over the bus.
    """
    found: dict[str, Any] = dict.fromkeys(_COUNTERS, 0)
    found["waited_seconds"] = found["hidden_seconds"] = 0.0
    if driver_choice.is_off() or not _was_used():
        return found
    extension = {**_extension().statistics(), **_extension().state_statistics()}
    found.update({name: extension[name] for name in _COUNTERS if name in extension})
    devices = [_core.query_device(number) for number in range(_core.device_count())]
    found["state_host_bytes"] = _extension().state_host_bytes()
    found["device_bytes"] = max(device.held_bytes for device in devices)
    found["peak_device_bytes"] = max(device.peak_bytes for device in devices)
    return found


_COUNTERS = (
    *("device_bytes", "peak_device_bytes", "evicted_bytes", "loaded_bytes", "evictions", "prefetch_hits"),
    *("prefetch_late", "waited_seconds", "hidden_seconds", "slow_reads", "host_bytes"),
    *("state_evicted_bytes", "state_loaded_bytes", "state_host_bytes"),
)


def evict(wanted_bytes: int) -> int:
    """Evicts so many bytes of saved tensors, or all that can leave; how many left. For tests and for IBM's names."""
    return int(_extension().evict(wanted_bytes))


def _extension() -> Any:
    return torch_extension.load("_lms")


def _was_used() -> bool:
    return _now.is_on or torch_extension.is_loaded("_lms")


def _apply_rules() -> None:
    _extension().set_rules(True, _now.min_size, _now.limit == 0)


def _apply_device_limit(wanted: int | None) -> None:
    device = _core.query_device(0)
    if wanted is None:
        allowed: int | None = device.total_bytes - min(_RESERVE_BYTES, device.total_bytes // 16)
    else:
        allowed = wanted or None
    if allowed is not None and device.held_bytes > allowed:
        _make_room(allowed)
        held = _core.query_device(0).held_bytes
        if held > allowed:
            raise OutOfMemoryError(
                f"{format_size(held)} of device memory are held and can't leave, more than the limit of "
                f"{format_size(allowed)}: the limit stays as it was. Free memory, pause a tag, or take a higher limit",
                held - allowed,
                0,
                allowed,
                0,
            )
    _now.limit = wanted
    _apply_limit("device_limit", allowed)
    optimizer_states.forget_shortage()
    _apply_rules()


def _make_room(allowed_bytes: int) -> None:
    """Evicts until no more is held, or until nothing can leave: what leaves need not free whole segments."""
    _trim()
    while (held := _core.query_device(0).held_bytes) > allowed_bytes:
        if not evict(held - allowed_bytes) and not _extension().make_room_of_states(held - allowed_bytes):
            return
        _trim()


def _trim() -> None:
    """Gives back the segments of LMS's pools that are free as a whole."""
    extension = torch_extension.load()
    for pool in registry.pools(TAG):
        extension.pool_trim(pool.handle)


def _apply_limit(name: str, wanted: int | None) -> None:
    """Sets a limit of ebbtide, but never above the one that the user set."""
    before, made = _now.changed.get(name, (0, None))
    if (current := _core.get_limit(name.removesuffix("_limit"))) != made:  # the user's, who has the last word
        before = current
    if wanted is None:
        _restore(name)
        return
    made = min(wanted, before)
    _now.changed[name] = (before, made)  # first: an interrupt in between must not leave a limit that nobody ends
    configure(**{name: made})  # type: ignore[arg-type]


def _restore(name: str) -> None:
    before, made = _now.changed.get(name, (0, None))
    if made is not None and _core.get_limit(name.removesuffix("_limit")) == made:  # nobody has changed it since
        configure(**{name: None if before == _core.UNLIMITED else before})  # type: ignore[arg-type]
    _now.changed.pop(name, None)
