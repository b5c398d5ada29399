"""The pybind11 binding of ebbtide.h, which only converts arguments and results. Every call releases the GIL.

Failures raise the classes of ebbtide.errors; malformed arguments raise ValueError.
"""

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from typing_extensions import Self

__version__: str
TAGGING_UNSET: int  # 0
TAGGING_OFF: int  # 1
TAGGING_ON: int  # 2
UNLIMITED: int  # 2**64 - 1

class Report:
    """ebbtide_report: kind is "pause", "resume", "prepare", "trim", "promote" or "demote"; sizes in bytes."""

    kind: str
    bytes: int
    copied: int
    skipped: int
    clean: int
    unused: int
    constant: int
    seconds: float
    note: str
    @property
    def rows(self) -> list[tuple[str, int, int, int, int, int, int, int]]: ...  # tag, device, bytes to constant
    @property
    def remaining(self) -> list[tuple[str, int, int]]: ...  # tag, device, bytes
    @property
    def plain(self) -> tuple[str, int, int, int, int, int, int, float, str]: ...  # kind to note

class DeviceInfo:
    device: int
    name: str
    uuid: bytes  # 16
    compute_capability: int
    total_bytes: int
    free_bytes: int
    granularity_bytes: int
    held_bytes: int
    limit_bytes: int
    room_bytes: int
    peak_bytes: int

class AllocationInfo:
    address: int
    size_bytes: int
    resident_bytes: int
    stored_bytes: int
    device: int
    place: str  # "device" | "host" | "stored" | "dropped" | "mixed"
    backup: int
    chunk_count: int
    is_trimmed: bool
    sequence: int
    tag: str
    host_bytes: int
    is_paused: bool
    is_exportable: bool
    is_kept: bool
    is_lent: bool

class TagInfo:
    tag: str
    state: str  # "resident" | "paused" | "partial" | "empty"
    lease_count: int
    allocation_count: int
    size_bytes: int
    resident_bytes: int
    stored_bytes: int
    dropped_bytes: int
    trimmed_bytes: int
    retained_bytes: int
    host_bytes: int
    paused_host_bytes: int
    detached_bytes: int
    backups: int  # bit 1 << code of each kind
    is_hooked: bool  # memory that the program allocated outside regions has it
    ahead_bytes: int
    kept_bytes: int

class HeldLease:
    """A lease while its Frame holds it."""

    id: int
    epoch: int
    is_away: bool
    is_open: bool

class Frame:
    """One open `with`, or something that is open like one: leases, counted captures, and uses of torch's allocator.
    Each is begun and recorded in one step; close() or destruction ends all."""

    after: Callable[[], Any] | None  # called once it is closed, by the `with`
    task: int  # the id of the asyncio task that enters it, or 0: another one of this thread can't enter one inside it
    takes_all_threads: bool
    hides_outer: bool
    beats_all: bool
    refusal_beside: str
    @property
    def is_closed(self) -> bool: ...
    @property
    def is_active(self) -> bool: ...
    def add_use(
        self,
        enter: Callable[..., Any],
        arguments: tuple[Any, ...],
        leave: tuple[Callable[..., Any], ...],
        leaves_by_token: bool = False,
    ) -> None: ...
    def tag_thread(self, tag: str, backup: int, retain: bool) -> None:
        """In a preloaded program: torch's allocations besides the pools have this tag, as long as the newest lease."""

    def leave_thread_untagged(self) -> None:
        """In a preloaded program: torch's allocations besides the pools are the driver's own."""

    def open_lease(self, tag: str, holder: str) -> HeldLease: ...
    def withhold(self) -> HeldLease: ...  # of which the core need not know
    def begin_capture(self) -> None: ...
    def push(self) -> None: ...  # makes it the innermost one of this thread
    def activate(self) -> None: ...  # of a frame that is on no thread's stack
    def close(self) -> None: ...  # a second call does nothing
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

class AllocationScope:
    """A `with` that opens a frame in its thread in one step. csrc/bindings/scopes.cpp has the protocol."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

class Scope:
    """A `with` whose `_open` and `_close` are long, and that no interrupt leaves half done."""

    _failure: BaseException | None
    def __enter__(self) -> Any: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

class PausedSet:
    """ebbtide_paused_set: the allocations that a pause took memory from."""

    def tags(self) -> list[str]: ...

class Backup:
    """The stored bytes of a range: a buffer (PEP 3118, format "B", 1-D) that keeps them alive, read-only by default."""

    address: int
    size_bytes: int
    def __buffer__(self, flags: int, /) -> memoryview: ...

class Operation:
    """A claim: commit or abandon it; dropping it abandons it."""

    def commit(self) -> Report: ...
    def abandon(self) -> None: ...

class Pending:
    """A resume under way, which goes on when this is dropped. Ranges are (address, bytes); none means all bytes."""

    def stream_wait(self, device: int, stream: int, ranges: Sequence[tuple[int, int]] = ()) -> None: ...
    def is_ready(self, address: int, size_bytes: int) -> bool: ...
    def is_over(self) -> bool: ...
    def wait(self) -> Report: ...

def loaded_library() -> str: ...
def use_driver(name: str | None) -> None: ...
def driver_name() -> str: ...
def driver_version() -> int: ...
def device_count() -> int: ...
def query_device(device: int) -> DeviceInfo: ...
def capabilities(device: int) -> list[tuple[str, bool, str, str]]: ...  # name, is_available, found, advice
def reset_peaks() -> None: ...
def set_lms_limit(size_bytes: int) -> None: ...
def set_lms_host_limit(size_bytes: int) -> None: ...
def leave_torch_to_lms(is_left: bool) -> None: ...
def fill_host_pool(device: int) -> None: ...
def settings() -> list[dict[str, Any]]: ...  # the fields of ebbtide.settings.Setting, and source, problem
def check_setting(name: str, text: bytes, label: str | None = None) -> bytes: ...  # in its plain form
def configure(name: str, value: bytes | None) -> None: ...
def get_setting(name: str) -> bytes: ...  # in its plain form; "" where None would set it
def check_disk_directory(path: bytes, files: str) -> None: ...
def check_tag(text: bytes) -> None: ...
def encode_tag(text: str | bytes) -> str:
    """Any string as a tag. A str with lone surrogates is a TypeError."""

def decode_tag(tag: str) -> bytes:
    """The string that became this tag."""

def program_policy() -> tuple[int, str, int]:
    """The tagging (TAGGING_...), tag and backup of threads of a preloaded program that have no policy of their own."""

def thread_policy() -> tuple[int, str, int]:
    """Those of the calling thread."""

def alloc(
    tag: str,
    size_bytes: int,
    device: int = 0,
    backup: int = 1,
    retain: bool = False,
    overflow: int = 0,
    flushes_first: bool = False,
    exportable: bool = False,
) -> int: ...
def free(address: int) -> None: ...
def find(address: int) -> AllocationInfo | None: ...
def is_away(address: int, size_bytes: int) -> bool: ...
def is_missing(address: int, size_bytes: int) -> bool: ...
def bind_slot(
    tag: str,
    device: int,
    backup: int,
    retain: bool = False,
    overflow: int = 0,
    flushes_first: bool = False,
    exportable: bool = False,
) -> int: ...
def export(address: int) -> list[tuple[int, int]] | None: ...  # size and descriptor, the caller's; None: busy
def end_export(address: int) -> None: ...
def refuse_moves(address: int, refuses: bool) -> None: ...
def keep(address: int) -> None: ...
def end_keep(address: int) -> None: ...
def hand_over(
    tags: Sequence[str],
    missing_ok: bool = False,
    *,
    wants: Callable[[int, int], bool],
    give: Callable[[int, int, int], bool],
    released: Callable[[int, int], None],
    **options: Any,
) -> Report: ...
def find_leaving(tags: Sequence[str]) -> list[tuple[int, int, bool]]: ...  # device, size, whether it can be given

class Reception:
    def __init__(self, leaving: Sequence[tuple[int, int, bool]], must_clear: bool) -> None: ...
    def resume(
        self, tags: Sequence[str], missing_ok: bool, want: Callable[[int, int], None], **options: Any
    ) -> Report: ...
    def receive(self, device: int, size_bytes: int, file: int) -> None: ...
    def note_released(self, device: int, size_bytes: int) -> None: ...
    def end(self) -> None: ...

class Import:
    address: int
    def __init__(self, device: int, pieces: Sequence[tuple[int, int]]) -> None: ...
    def wait(self) -> None: ...
    def unmap(self) -> None: ...
    def map(self, pieces: Sequence[tuple[int, int]]) -> None: ...
    def free(self) -> None: ...

def torch_functions(slot: int) -> tuple[int, int]: ...
def last_lease() -> int: ...
def pause_count(tag: str) -> int: ...
def others_in_regions() -> list[int]: ...
def reenter() -> None: ...
def capture_count() -> int: ...
def expand_segments(setter: Callable[[str], None] | None, on: str = ..., off: str = ...) -> None: ...
def call_together(*calls: tuple[Callable[..., Any], tuple[Any, ...]]) -> None: ...
def call_next(calls: list[tuple[Callable[[str], Any], str]]) -> None: ...

# options: fields of ebbtide_request by their names; a list stands for a pointer and its count.
def pause(tags: Sequence[str], missing_ok: bool = False, **options: Any) -> Report: ...
def resume(tags: Sequence[str], missing_ok: bool = False, **options: Any) -> Report: ...
def prepare(tags: Sequence[str], missing_ok: bool = False, **options: Any) -> Report: ...
def promote(tags: Sequence[str], missing_ok: bool = False, **options: Any) -> Report: ...
def demote(tags: Sequence[str], missing_ok: bool = False, **options: Any) -> Report: ...
def trim(tags: Sequence[str], missing_ok: bool = False, **options: Any) -> Report: ...
def resume_async(tags: Sequence[str], missing_ok: bool = False, **options: Any) -> Pending: ...
def swap(
    leaving: Sequence[str],
    returning: Sequence[str],
    missing_ok: bool = False,
    retain: int = -1,
    **options: Any,  # of the pause
) -> tuple[Report, Report]: ...
def preview(kind: str, tags: Sequence[str], missing_ok: bool = False, **options: Any) -> list[str]: ...
def claim(kind: str, tags: Sequence[str], missing_ok: bool = False, **options: Any) -> Operation: ...

class CopyAhead:
    """Steps of copies ahead of a pause of one tag; one thread at a time."""

    is_over: bool
    is_held_up: bool  # the last step did nothing, since a capture is under way
    # 0 threads: as many as a pause uses. unused: address and bytes of unused ranges.
    def __init__(self, tag: str, step_bytes: int, threads: int, unused: Sequence[tuple[int, int]]) -> None: ...
    def step(self) -> Report: ...

def wait_for_tags(tags: Sequence[str]) -> None: ...
def backup_of(address: int, size_bytes: int, writable: bool = False, retained: bool = False) -> Backup | None: ...
def tags() -> list[TagInfo]: ...
def query_tag(tag: str) -> TagInfo | None: ...
def require_tag(tag: str) -> None: ...
def allocations(tag: str | None = None) -> list[AllocationInfo]: ...
def stretches(address: int, size_bytes: int) -> list[tuple[int, int, str, str]]: ...  # address, bytes, place, verdict
def living_types(roots: list[Any] | None) -> list[type]: ...
def living_objects(types: list[type], roots: list[Any] | None) -> list[Any]: ...
def referrer_types(things: list[Any], own: list[Any], roots: list[Any] | None) -> list[type | None]: ...
def stats() -> dict[str, int]: ...
def events(after_sequence: int = 0) -> list[tuple[int, float, float, str, str, int, int, str]]:
    """sequence, unix_seconds, seconds, kind, tags, bytes, copied, detail"""
