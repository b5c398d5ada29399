"""Progress bars: who draws them, who sees them, and what they leave on the terminal."""

import sys

import pytest

torch = pytest.importorskip("torch")

from ebbtide.saver.telling import bars, watch  # noqa: E402
from progress_model import BLOCK, block, settled, short_thresholds, simulator, slow_operations  # noqa: E402

pytestmark = pytest.mark.sim_only  # the simulator's delays make operations long


@pytest.fixture(autouse=True)
def slow(monkeypatch):
    """Operations that take a while, and bars of each."""
    for made in simulator():
        for _ in short_thresholds(monkeypatch):
            yield from slow_operations(made)


@pytest.mark.parametrize("has", ["rich", "tqdm", "neither"])
def test_bars_are_drawn_by_what_is_installed(saver, tag, slow, has, monkeypatch, capfd):
    """With neither, `True` says so once."""
    drawn = []

    class Tqdm:
        total = n = 0

        def __init__(self, **options):
            drawn.append(options["desc"])

        def refresh(self):
            drawn.append(self.n)

        def close(self):
            drawn.append("closed")

    if has != "rich":
        monkeypatch.setitem(sys.modules, "rich", None)
        monkeypatch.setitem(sys.modules, "rich.console", None)
        module = type(sys)("tqdm")
        module.tqdm = Tqdm
        monkeypatch.setitem(sys.modules, "tqdm", module if has == "tqdm" else None)
    keep = block(saver, tag)
    saver.configure(progress=True)
    if has == "neither":
        with pytest.warns(RuntimeWarning, match="neither rich nor tqdm is installed"):
            saver.pause(tag)
            settled()
    else:
        saver.pause(tag)
        settled()
    written = capfd.readouterr().err
    if has == "rich":
        assert f"ebbtide pause {tag[:20]}" in written and "\x1b[?25h" in written  # the cursor is back
    if has == "tqdm":
        assert drawn[0] == f"ebbtide pause {tag}" and drawn[-1] == "closed"
    saver.resume(tag)
    settled()
    assert int(keep[-1]) == BLOCK - 1


def test_in_a_notebook_a_line_is_shown_and_goes(saver, tag, monkeypatch, capfd):
    shown = []

    class Line:
        def update(self, data, raw):
            shown.append(data["text/plain"])

    def display(data, raw, display_id):
        shown.append(data["text/plain"])
        return Line()

    shell = type("Shell", (), {"kernel": object()})()
    notebook = type(sys)("IPython")
    notebook.display = type(sys)("IPython.display")
    notebook.get_ipython = lambda: shell
    notebook.display.display = display
    monkeypatch.setitem(sys.modules, "IPython", notebook)
    monkeypatch.setitem(sys.modules, "IPython.display", notebook.display)
    keep = block(saver, tag)
    saver.configure(progress=True)
    saver.pause(tag)
    settled()
    assert shown[0].startswith(f"ebbtide pause {tag}: ") and shown[-1] == ""
    assert capfd.readouterr().err == ""  # neither a warning nor what moves a terminal's cursor
    shell.kernel = None  # IPython in a terminal
    assert isinstance(bars.make_bars(is_forced=True)._drawing, bars._RichBars)
    saver.resume(tag)
    assert int(keep[-1]) == BLOCK - 1


class Terminal:
    def __init__(self, is_terminal):
        self.is_terminal = is_terminal

    def isatty(self):
        if self.is_terminal is None:
            raise ValueError("closed")
        return self.is_terminal


@pytest.mark.parametrize(
    ("display", "is_terminal", "expected"),
    [
        (None, True, True),
        (None, False, False),
        (None, None, False),
        (True, False, True),
        (False, True, False),
        (print, False, True),
    ],
)
def test_who_sees_progress(monkeypatch, display, is_terminal, expected):
    monkeypatch.setattr(sys, "stderr", Terminal(is_terminal))
    monkeypatch.setattr(watch, "_display", display)
    assert watch._is_wanted() is expected
    monkeypatch.setattr(watch, "_is_child", True)
    assert watch._is_wanted() is False
    monkeypatch.setattr(sys, "stderr", None)
    monkeypatch.setattr(watch, "_display", None)
    assert watch._is_wanted() is False and bars.make_bars(is_forced=True) is None


def test_a_terminal_gets_a_bar_of_a_long_operation_by_default_and_is_left_clean(run_python, driver_name, tmp_path):
    """Over a pseudo-terminal. A forked child draws nothing."""
    script = tmp_path / "program.py"
    script.write_text("""
import os, torch
from ebbtide import errors, saver
from ebbtide.saver.telling import watch
from core_sim import Sim
with saver.region("weights"):
    keep = torch.ones(1 << 20)
Sim().delay("cuMemUnmap", 1.5)
saver.pause("weights")
child = os.fork()
if child == 0:
    watch.set_display(True)
    try:
        saver.resume("weights")
    except errors.StateError:
        os._exit(0 if watch._watcher is None and not watch._running else 1)
    os._exit(2)
assert os.waitpid(child, 0)[1] == 0
""")
    code = f"""
    import os, pty, sys
    sys.exit(os.waitstatus_to_exitcode(pty.spawn([sys.executable, {str(script)!r}])))
    """
    done = run_python(code, EBBTIDE_DRIVER=driver_name, PYTHONPATH=":".join(sys.path), TERM="xterm", COLUMNS="100")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ebbtide pause weights" in done.stdout
    assert done.stdout.rindex("\x1b[?25h") > done.stdout.rindex("\x1b[?25l")  # the cursor is shown again
