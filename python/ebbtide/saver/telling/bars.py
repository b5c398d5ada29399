"""Progress bars on stderr, drawn by rich, or by tqdm where rich is missing; in a notebook, a line below the cell."""

import datetime
import sys
import time
from typing import Any, Protocol

from ebbtide.locks import make_lock
from ebbtide.saver.telling import terminal
from ebbtide.saver.values.progress import Progress
from ebbtide.sizes import format_size


class Bars:
    """A bar for each operation under way. One thread shows and ends them. What any thread prints meanwhile to
    `sys.stdout` or `sys.stderr` takes the bars away first, and the next `show` draws them anew below it."""

    def __init__(self, drawing: "_Drawing") -> None:
        self._drawing = drawing
        self._stream = terminal.own(sys.stderr)
        self._lock = make_lock()
        self._keys: set[int] = set()
        self._streams: list[terminal.Clearing] = []

    def show(self, key: int, progress: Progress) -> None:
        """Draws the bar of the operation `key`, unless the program is midway through a line."""
        with self._lock:
            if not self._keys and self._drawing.gives_way_to_prints:
                self._streams = terminal.install(self._drawing.clear, self._lock)
            self._keys.add(key)
            if not any(stream.is_mid_line for stream in self._streams):
                self._drawing.draw(key, progress)

    def is_of_another_stream(self) -> bool:
        """Whether stderr was replaced since, and nothing is drawn."""
        return not self._keys and terminal.own(sys.stderr) is not self._stream

    def end(self, key: int) -> None:
        """Removes it from the terminal."""
        with self._lock:
            if key not in self._keys:
                return
            try:
                self._drawing.remove(key)
            finally:
                self._keys.remove(key)
                if not self._keys:
                    terminal.uninstall()


def make_bars(is_forced: bool) -> Bars | None:
    """Bars on stderr as it is now, or in the notebook; None where neither rich nor tqdm is installed.

    Args:
        is_forced: draw even if stderr is no terminal.
    """
    if sys.stderr is None:
        return None
    for drawing in (_NotebookBars, _RichBars, _TqdmBars):
        try:
            return Bars(drawing(is_forced))
        except ImportError:
            pass
    return None


class _Drawing(Protocol):
    # Whether what the program prints takes the bars away first.
    gives_way_to_prints: bool

    def draw(self, key: int, progress: Progress) -> None: ...
    def remove(self, key: int) -> None: ...
    def clear(self) -> None:
        """Takes all bars from the terminal until they are drawn again."""


def _name(progress: Progress) -> str:
    name = " ".join(("ebbtide", progress.operation, *progress.tags[:3]))
    return f"{name} ..." if len(progress.tags) > 3 else name


def _known_total(progress: Progress) -> int | None:
    """None where nothing is known of an operation until its end: its bar pulses."""
    return progress.total_bytes if progress.done_bytes else None


class _NotebookBars:
    """A display that is updated. rich would need ipywidgets, and writes for terminals without it."""

    gives_way_to_prints = False  # they have places of their own

    def __init__(self, is_forced: bool) -> None:
        shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
        if getattr(shell, "kernel", None) is None:
            raise ImportError("this is no notebook")
        from IPython.display import display

        self._display: Any = display
        self._lines: dict[int, Any] = {}

    def draw(self, key: int, progress: Progress) -> None:
        done, total = format_size(progress.done_bytes), _known_total(progress)
        of_total = "" if total is None else f" of {format_size(total)}"
        line = {"text/plain": f"{_name(progress)}: {done}{of_total}, {progress.seconds:.0f} s"}
        if key in self._lines:
            self._lines[key].update(line, raw=True)
        else:
            self._lines[key] = self._display(line, raw=True, display_id=True)

    def remove(self, key: int) -> None:
        line = self._lines.pop(key, None)
        if line is not None:
            line.update({"text/plain": ""}, raw=True)

    def clear(self) -> None:
        """Nothing that is printed meets them."""


class _RichBars:
    gives_way_to_prints = True

    def __init__(self, is_forced: bool) -> None:
        from rich import progress as rich_progress
        from rich.console import Console

        self._columns = (
            rich_progress.TextColumn("{task.description}", markup=False),
            rich_progress.BarColumn(),
            rich_progress.DownloadColumn(binary_units=True),
            rich_progress.TextColumn("{task.fields[age]}", style="progress.elapsed"),
        )
        self._make = rich_progress.Progress
        self._console = Console(file=terminal.own(sys.stderr), force_terminal=True if is_forced else None)
        self._live: Any = None
        self._tasks: dict[int, Any] = {}

    def draw(self, key: int, progress: Progress) -> None:
        age = str(datetime.timedelta(seconds=int(progress.seconds)))
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
            self._tasks[key] = self._live.add_task(_name(progress), total=None, age=age)
        self._live.update(
            self._tasks[key], completed=progress.done_bytes, total=_known_total(progress), age=age, refresh=True
        )

    def remove(self, key: int) -> None:
        task = self._tasks.pop(key, None)
        if not self._tasks:
            self.clear()
        elif task is not None:
            self._live.remove_task(task)

    def clear(self) -> None:
        live, self._live = self._live, None
        self._tasks.clear()
        if live is not None:
            live.stop()


class _TqdmBars:
    # tqdm has one lock for all bars, which a program that writes by tqdm.write holds as it prints: with another lock
    # around ours, the two would wait for each other.
    gives_way_to_prints = False

    def __init__(self, is_forced: bool) -> None:
        from tqdm import tqdm

        self._make: Any = tqdm
        self._stream = terminal.own(sys.stderr)
        self._bars: dict[int, Any] = {}

    def draw(self, key: int, progress: Progress) -> None:
        if key not in self._bars:
            self._bars[key] = self._make(
                desc=_name(progress), unit="B", unit_scale=True, unit_divisor=1024, leave=False, file=self._stream
            )
            self._bars[key].start_t = time.time() - progress.seconds
        bar = self._bars[key]
        bar.total = _known_total(progress)
        bar.n = progress.done_bytes
        bar.refresh()

    def remove(self, key: int) -> None:
        bar = self._bars.pop(key, None)
        if bar is not None:
            bar.close()

    def clear(self) -> None:
        for bar in self._bars.values():
            bar.clear()
