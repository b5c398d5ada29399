"""Progress bars: when one is drawn, and what it leaves on the terminal."""

import sys

import pytest

torch = pytest.importorskip("torch")

from ebbtide.saver.telling import watch  # noqa: E402

pytestmark = pytest.mark.sim_only  # the simulator's delays make operations long


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
        (False, True, False),
        (print, False, True),
    ],
)
def test_which_operations_are_shown(monkeypatch, display, is_terminal, expected):
    monkeypatch.setattr(sys, "stderr", Terminal(is_terminal))
    monkeypatch.setattr(watch, "_display", display)
    assert watch._is_wanted() is expected
    monkeypatch.setattr(sys, "stderr", None)
    monkeypatch.setattr(watch, "_display", None)
    assert watch._is_wanted() is False


@pytest.fixture
def on_a_terminal(run_python, driver_name):
    """Runs a program over a pseudo-terminal, and gives what it wrote there."""

    def run(program, **environment):
        code = f"""
        import os, pty, sys, torch
        sys.path[:] = {sys.path!r}
        child, terminal = pty.fork()
        if child == 0:
            sys.stdout.reconfigure(line_buffering=True)
            exec({PRELUDE + program!r})
            sys.exit(0)
        try:
            while written := os.read(terminal, 1 << 16):
                os.write(1, written)
        except OSError:
            pass  # its end
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """
        done = run_python(code, EBBTIDE_DRIVER=driver_name, TERM="xterm", COLUMNS="100", **environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


PRELUDE = """
import os, sys, threading, time, torch
from ebbtide import errors, saver
from ebbtide.saver.telling import watch
from core_sim import Sim
watch.BAR_SECONDS = 0.1
streams = sys.stdout, sys.stderr
with saver.region("weights"):
    keep = torch.ones(1 << 20)
with saver.region("cache"):
    other = torch.ones(1 << 20)
Sim().delay("cuMemUnmap", 0.6)
"""
HIDES, SHOWS = "\x1b[?25l", "\x1b[?25h"  # the cursor


def test_a_long_operation_has_a_bar_that_is_gone_at_its_end(on_a_terminal):
    """What the program prints next has a line of its own, and its streams are its own all the time. A forked child
    draws nothing."""
    written = on_a_terminal("""
saver.on("after_pause", "weights", lambda tag: sys.stdout is streams[0] and sys.stderr is streams[1] or os._exit(1))
saver.pause("weights")
print("DONE")
child = os.fork()
if child == 0:
    try:
        saver.resume("weights")
    except errors.StateError:
        sys.exit(0)
    os._exit(2)
assert os.waitpid(child, 0)[1] == 0
""")
    assert "ebbtide pause weights" in written
    assert written.count(HIDES) == written.count(SHOWS) == 1 and written.rindex(SHOWS) > written.rindex(HIDES)
    last = written[: written.index("DONE")].rpartition("\n")[2]
    assert last.rpartition("\x1b[2K")[2].strip("\r") == "" and "pause" not in last.rpartition("\x1b[2K")[2]


def test_two_operations_share_the_terminal(on_a_terminal):
    written = on_a_terminal("""
threads = [threading.Thread(target=saver.pause, args=(tag,)) for tag in ("weights", "cache")]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
""")
    assert "ebbtide pause weights" in written and "ebbtide pause cache" in written
    assert written.count(HIDES) == written.count(SHOWS) >= 1


def test_a_program_that_ends_midway_has_its_cursor_back(on_a_terminal):
    written = on_a_terminal("""
threading.Thread(target=saver.pause, args=("weights",), daemon=True).start()
while watch._bars._live is None:
    time.sleep(0.01)
time.sleep(0.05)
""")
    assert "ebbtide pause weights" in written
    assert written.rindex(SHOWS) > written.rindex(HIDES)
