"""`saver.region` and `saver.disabled`: contexts that decide which tag a thread's allocations get."""

import functools
import inspect
import logging
import warnings
from collections.abc import Callable, Generator
from typing import Any, Literal, ParamSpec, TypeVar

from ebbtide import _core
from ebbtide.saver.pools import backends, ordinary_memory
from ebbtide.saver.pools.region_pools import registry
from ebbtide.saver.reclaim import torch_cache
from ebbtide.saver.regions import entry, startup
from ebbtide.saver.state import program
from ebbtide.saver.values.arguments import (
    NO_OVERFLOW_CODE,
    BackupName,
    OverflowName,
    backup_code,
    backup_names,
    check_tag,
    exportable_flag,
    overflow_code,
    overflow_name,
    retain_flag,
)
from ebbtide.scopes import run_inside

_P = ParamSpec("_P")
_R = TypeVar("_R")

_logger = logging.getLogger(__name__)

Threads = Literal["own", "all"]
_RAM = backup_code("ram")


class _AllocationScope(ordinary_memory.FrameScope):
    """A context manager that may be nested in itself and entered by several threads. Also a decorator."""

    def __call__(self, function: Callable[_P, _R]) -> Callable[_P, _R]:
        """Decorates a function, so that its body runs inside. The body of a generator function runs inside as well, but
        while it waits at a yield the thread is outside. A generator that is closed or collected ends outside if its
        region can't be entered.

        Raises:
            TypeError: a class or a coroutine function.
        """
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(
                "a coroutine shares its thread while it waits: use a with block around the code that allocates"
            )
        if isinstance(function, type) or not callable(function):
            raise TypeError(f"this decorates functions, not {function!r}")
        if inspect.isgeneratorfunction(function):
            return self._wrap_generator(function)
        return run_inside(function, lambda: self)

    def _wrap_generator(self, function: Callable[_P, Any]) -> Callable[_P, Any]:
        @functools.wraps(function)
        def inside(*args: _P.args, **kwargs: _P.kwargs) -> Generator[Any, Any, Any]:
            generator = function(*args, **kwargs)
            call: Callable[[Any], Any] = generator.send
            passed: list[Any] = [None]  # passed objects live no longer than without the decorator
            while True:
                try:
                    with self:
                        passed.append(call(passed.pop()))
                except StopIteration as stop:
                    return stop.value
                try:
                    passed.append((yield passed.pop()))
                except GeneratorExit:
                    self._end(generator)
                    raise
                except BaseException as error:
                    call = generator.throw
                    passed.append(error)
                else:
                    call = generator.send

        return inside

    def _end(self, generator: Generator[Any, Any, Any]) -> None:
        """Closes a decorated generator, inside where that is possible. Where it is not (no room for trimmed memory, a
        forked child), its `finally` blocks run outside: a collected generator's error would be lost."""
        is_inside = False
        try:
            with self:
                is_inside = True
                generator.close()
        except Exception as error:
            if is_inside:
                raise
            _logger.debug("a generator that is collected or closed ends outside its region: %r", error)
        finally:
            if not is_inside:
                generator.close()


class Region(_AllocationScope):
    """The context manager that `saver.region` returns."""

    def __init__(
        self,
        tag: str,
        *,
        backup: BackupName | None = "ram",
        threads: Threads = "own",
        retain: bool = False,
        overflow: OverflowName | None = None,
        exportable: bool = False,
        warns: bool = False,
    ) -> None:
        if inspect.isfunction(tag):
            raise TypeError('a region needs a tag: @saver.region("tag")')
        self.tag = check_tag(tag)
        self.backup = backup
        code = backup_code(backup)
        self.retain = retain_flag(retain, code)
        self.overflow = overflow
        self.exportable = exportable_flag(exportable, overflow_code(overflow))
        self._policy = entry.RegionPolicy(self.tag, code, self.retain, overflow_code(overflow), self.exportable)
        if threads not in ("own", "all"):
            raise ValueError(f'threads must be "own" (what this thread allocates) or "all", not {threads!r}')
        self.threads: Threads = threads
        self._warns = warns and backup == "ram" and not self.retain and overflow is None and not exportable

    def _prepare(self, frame: "_core.Frame") -> bool:
        frame.task = ordinary_memory.running_task()
        if self._warns:
            _warn_of_another_policy(self.tag)
        return entry.prepare_region(frame, self._policy, self.threads == "all")

    def __repr__(self) -> str:
        text = f"saver.region({self.tag!r}, backup={self.backup!r}, threads={self.threads!r}"
        text += ", retain=True" if self.retain else ""
        text += ", exportable=True" if self.exportable else ""
        return text + (f", overflow={self.overflow!r})" if self.overflow else ")")


def _warn_of_another_policy(tag: str) -> None:
    """For a region without arguments, the first of its tag: another region's arguments are easily taken for the
    tag's own."""
    others = registry.policies(tag)
    if not others or any(
        key.backup == _RAM and not key.retain and key.overflow == NO_OVERFLOW_CODE and not key.is_exportable
        for key in others
    ):
        return
    latest = others[-1]
    (backup,) = backup_names(1 << latest.backup)
    stated = f"backup={backup!r}" + (", retain=True" if latest.retain else "")
    stated += ", exportable=True" if latest.is_exportable else ""
    stated += "" if latest.overflow == NO_OVERFLOW_CODE else f", overflow={overflow_name(latest.overflow)!r}"
    warnings.warn(
        f"saver.region({tag!r}) has the default policy (backup='ram'), while an earlier region of the tag has "
        f"{stated}: a policy belongs to a region. State the same arguments, or keep the region in a variable and enter "
        "it again",
        RuntimeWarning,
        stacklevel=3,
    )


class Disabled(_AllocationScope):
    """The context manager that `saver.disabled` returns."""

    def _prepare(self, frame: "_core.Frame") -> bool:
        # torch's cached memory in a pauseable program is tagged.
        if program.own() is not None:
            return _prepare_separate(frame)
        frame.leave_thread_untagged()
        return ordinary_memory.prepare_ordinary(frame)

    def __repr__(self) -> str:
        return "saver.disabled()"


class Separate(_AllocationScope):
    """The context manager that `separate_memory` returns."""

    def _prepare(self, frame: "_core.Frame") -> bool:
        return _prepare_separate(frame)


def _prepare_separate(frame: "_core.Frame") -> bool:
    backend = startup.backend()
    if backend is None or backends.is_forked_child():
        return False
    separation = backend.separate()
    ordinary_memory.prepare_separate(frame, separation, backend.inner_beats_all)
    # In one call, so that an interrupt leaves at most a cache that is not emptied.
    frame.after = functools.partial(_core.call_together, *separation.ends, (torch_cache.empty, ()))
    return True


class Tagged(_AllocationScope):
    """In a preloaded program, torch's allocations of this thread outside our pools get the tag. `backup` is a core
    code."""

    def __init__(self, tag: str, backup: int) -> None:
        self._tag, self._backup = tag, backup

    def _prepare(self, frame: "_core.Frame") -> bool:
        prepare_tagged(frame, self._tag, self._backup)
        return True


def prepare_tagged(frame: "_core.Frame", tag: str, backup: int) -> None:
    """Fills the frame for `Tagged`."""
    frame.task = ordinary_memory.running_task()
    frame.beats_all = True  # without pools of its own it leaves the outer ones as they are
    frame.tag_thread(tag, backup, False)


def separate_memory() -> Separate:
    """`disabled` with memory from the driver instead of from torch's cache: in a pauseable program the cache is tagged,
    and other processes cannot open it. At the end torch's cache is emptied."""
    return Separate()


def region(
    tag: str,
    *,
    backup: BackupName | None = "ram",
    threads: Threads = "own",
    retain: bool = False,
    overflow: OverflowName | None = None,
    exportable: bool = False,
) -> Region:
    """Tags torch's allocations inside with `tag`, so that they can be paused.

        with saver.region("weights"):
            model = torch.nn.Linear(64, 64).to(saver.device)

    A context manager and a decorator. It may be nested (the inner region wins), entered again, and entered by several
    threads at once. It covers every device that the process sees. Tensors may outlive it. Don't `await` or `yield`
    inside: the thread stays in the region, and allocations of others there meanwhile get its tag.

    Args:
        tag: 1 to 255 bytes of UTF-8 without '*', '/' and control characters.
        backup: where the content is kept while the tag is paused. "ram": in host memory, which is returned to the
            system at resume. "pinned": in pinned host memory, which is kept for the next pause; this is the fastest,
            and no other program can use that memory. "disk": in a file in EBBTIDE_DISK_DIRECTORY. None drops the
            content at pause, and the memory comes back as zeros.
        threads: "own" covers allocations of the thread that entered the region. "all" covers those of every thread
            (autograd runs backward on threads of its own). If another thread is in a region of its own, that region
            wins on the simulated device. On a GPU the one entered last wins, or, before torch 2.11, the one entered
            first.
        retain: True keeps the backup's memory (or file) and content at resume. The next pause then needs no new
            memory, and copies only blocks that have changed.
        overflow: the answer when the device has too little room. None raises an OutOfMemoryError. "split" puts the
            beginning of an allocation on the device and the rest in host memory, which the device reads over the bus,
            behind one contiguous address. "whole" puts allocations larger than 0.6 of the free memory into
            host memory as a whole, and all others on the device.
        exportable: True lets other processes of this user use the memory (`saver.share`, `torch.multiprocessing`), and
            joins them (`configure(shared=True)`). The driver takes longer to make and to release such memory. Not with
            `overflow`.

    Raises:
        TypeError, ValueError: malformed arguments, at once; so is retain without a backup, and exportable with
            overflow.
        StateError: when entered: this torch and this driver do not go together, an allocator setting that cannot
            work, a forked child, another asyncio task of this thread that awaits inside a region.
        OutOfMemoryError: when entered: trimmed memory does not fit on the device. The region is not entered.
        StoreError: the same, for memory that lay on the host and finds too little room there, too.
    """
    return Region(
        tag, backup=backup, threads=threads, retain=retain, overflow=overflow, exportable=exportable, warns=True
    )


def disabled() -> Disabled:
    """Gives ordinary memory inside a region, for the length of a `with` or of the decorated function.

        with saver.region("weights"), saver.disabled():
            scratch = torch.empty(1 << 20, device=saver.device)

    In a pauseable program (`ebbtide run --pauseable`) it comes from the driver, since all that torch caches is tagged,
    and torch's cache is emptied at the end.

    Inside a region with threads="all" that this thread opened, the whole region is suspended meanwhile, for every
    thread. Afterwards it counts as the newest: it wins over regions that other threads opened for all threads
    meanwhile.
    """
    return Disabled()
