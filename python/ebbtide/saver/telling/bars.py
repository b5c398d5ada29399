"""Progress bars on stderr, drawn by rich, or by tqdm where rich is missing."""

import sys
from typing import Any, Protocol

from ebbtide.saver.values.progress import Progress


class Bars(Protocol):
    """A bar for each operation under way. One thread uses it."""

    def show(self, key: int, progress: Progress) -> None:
        """Draws the bar of the operation `key`."""

    def end(self, key: int) -> None:
        """Removes it from the terminal."""


def make_bars(is_forced: bool) -> Bars | None:
    """Bars on stderr as it is now; None where neither rich nor tqdm is installed.

    Args:
        is_forced: draw even if stderr is no terminal.
    """
    if sys.stderr is None:
        return None
    try:
        return _RichBars(is_forced)
    except ImportError:
        pass
    try:
        return _TqdmBars()
    except ImportError:
        return None


def _name(progress: Progress) -> str:
    name = " ".join(("ebbtide", progress.operation, *progress.tags[:3]))
    return f"{name} ..." if len(progress.tags) > 3 else name


class _RichBars:
    def __init__(self, is_forced: bool) -> None:
        from rich import progress as rich_progress
        from rich.console import Console

        self._columns = (
            rich_progress.TextColumn("{task.description}", markup=False),
            rich_progress.BarColumn(),
            rich_progress.DownloadColumn(binary_units=True),
            rich_progress.TimeElapsedColumn(),
        )
        self._make = rich_progress.Progress
        self._console = Console(stderr=True, force_terminal=True if is_forced else None)
        self._live: Any = None
        self._tasks: dict[int, Any] = {}

    def show(self, key: int, progress: Progress) -> None:
        if self._live is None:
            self._live = self._make(
                *self._columns,
                console=self._console,
                transient=True,
                auto_refresh=False,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
        if key not in self._tasks:
            self._tasks[key] = self._live.add_task(_name(progress), total=None)
        # Without a total the bar pulses: nothing is known of this operation until its end.
        total = progress.total_bytes if progress.done_bytes else None
        self._live.update(self._tasks[key], completed=progress.done_bytes, total=total)
        self._live.refresh()

    def end(self, key: int) -> None:
        task = self._tasks.pop(key, None)
        if self._live is None or task is None:
            return
        if self._tasks:
            self._live.remove_task(task)
            return
        live, self._live = self._live, None
        live.stop()


class _TqdmBars:
    def __init__(self) -> None:
        from tqdm import tqdm

        self._make: Any = tqdm
        self._bars: dict[int, Any] = {}

    def show(self, key: int, progress: Progress) -> None:
        if key not in self._bars:
            self._bars[key] = self._make(
                desc=_name(progress), unit="B", unit_scale=True, unit_divisor=1024, leave=False, file=sys.stderr
            )
        bar = self._bars[key]
        bar.total = progress.total_bytes if progress.done_bytes else None
        bar.n = progress.done_bytes
        bar.refresh()

    def end(self, key: int) -> None:
        bar = self._bars.pop(key, None)
        if bar is not None:
            bar.close()
