"""What a terminal shows after an operation that drew a bar: the program's lines, whole, and nothing else."""

import re
import sys

import pytest

torch = pytest.importorskip("torch")

from ebbtide.locks import make_lock  # noqa: E402
from ebbtide.saver.telling import bars, terminal  # noqa: E402
from ebbtide.saver.values.progress import Progress  # noqa: E402

pytestmark = pytest.mark.sim_only  # the simulator's delays make operations long

HEAD = """
import os, sys, threading, torch
from ebbtide import saver
from ebbtide.saver.telling import watch
from core_sim import Sim
watch.BAR_SECONDS = 0.3
with saver.region("weights"):
    keep = torch.randint(0, 256, (16 << 20,), dtype=torch.uint8)
Sim().delay("cuMemUnmap", 0.8)
"""


def screen(text):
    """The rows of a terminal that got this text."""
    rows, row, column = [""], 0, 0
    for match in re.finditer(r"\x1b\[\??([0-9;]*)([A-Za-z])|\r|\n|[^\x1b\r\n]+", text):
        piece, count, command = match[0], int(match[1] or 1) if (match[1] or "").isdigit() else 1, match[2]
        if piece == "\r":
            column = 0
        elif piece == "\n":
            row += 1
            rows += [""] * (row + 1 - len(rows))
        elif command == "A":
            row = max(row - count, 0)
        elif command == "K":
            rows[row] = ""
        elif command is None:
            rows[row] = rows[row][:column].ljust(column) + piece + rows[row][column + len(piece) :]
            column += len(piece)
    return [line.rstrip() for line in rows if line.strip()]


@pytest.fixture
def on_a_terminal(run_python, driver_name, tmp_path):
    def run(program):
        script = tmp_path / "program.py"
        script.write_text(HEAD + program)
        written = tmp_path / "written"
        code = f"""
        import os, pty, sys
        with open({str(written)!r}, "wb") as log:
            def read(terminal):
                data = os.read(terminal, 1 << 16)
                log.write(data)
                return data
            status = pty.spawn([sys.executable, {str(script)!r}], read)
        sys.exit(os.waitstatus_to_exitcode(status))
        """
        done = run_python(code, EBBTIDE_DRIVER=driver_name, PYTHONPATH=":".join(sys.path), TERM="xterm", COLUMNS="100")
        assert done.returncode == 0, done.stdout + done.stderr
        return written.read_bytes().decode()

    return run


def test_what_is_printed_after_an_operation_has_a_line_of_its_own(on_a_terminal):
    written = on_a_terminal("""
import time
from ebbtide.saver.telling import bars
end = bars.Bars.end
bars.Bars.end = lambda shown, key: (time.sleep(0.2), end(shown, key))
for number in range(3):
    saver.pause("weights")
    os.write(1, f"line {number} of the program\\n".encode())  # not by a stream that gives way
    saver.resume("weights")
""")
    assert written.count("ebbtide pause weights") >= 3
    assert screen(written) == [f"line {number} of the program" for number in range(3)]


def test_what_other_threads_print_meanwhile_stays_whole(on_a_terminal):
    written = on_a_terminal("""
def say():
    print("to stdout", 1, 2)
    sys.stderr.write("to ")
    sys.stderr.write("stderr\\n")
threading.Timer(0.55, say).start()
saver.pause("weights")
print("after", sys.stdout is sys.__stdout__ and sys.stderr is sys.__stderr__)
""")
    assert "ebbtide pause weights" in written
    assert screen(written) == ["to stdout 1 2", "to stderr", "after True"]


def test_a_child_that_is_forked_meanwhile_has_streams_of_its_own(on_a_terminal):
    written = on_a_terminal("""
import time
children, is_over = [], []
def fork():
    while sys.stdout is sys.__stdout__ and not is_over:  # until the bar is there
        time.sleep(0.01)
    kept = sys.stdout
    child = os.fork()
    if child == 0:
        is_own = kept is not sys.stdout and sys.stdout is sys.__stdout__
        kept.write("")
        os._exit(0 if is_own else 1)
    children.append(os.waitpid(child, 0)[1])
forking = threading.Thread(target=fork)
forking.start()
saver.pause("weights")
is_over.append(True)
forking.join()
print(children)
""")
    assert screen(written) == ["[0]"]


class Stream:
    encoding = "utf-8"

    def __init__(self):
        self.written = []

    def isatty(self):
        return True

    def write(self, text):
        self.written.append(text)
        return len(text)


class Drawing:
    gives_way_to_prints = True

    def __init__(self):
        self.acts = []

    def draw(self, key, progress):
        self.acts.append("draw")

    def remove(self, key):
        self.acts.append("remove")

    def clear(self):
        self.acts.append("clear")


def test_no_bar_is_drawn_into_a_line_that_the_program_has_begun(monkeypatch):
    out, err = Stream(), Stream()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    drawing, now = Drawing(), Progress("pause", ("a",), 0, 1, 70.0)
    shown = bars.Bars(drawing)
    shown.show(1, now)
    kept = sys.stdout
    print("half", end="")
    shown.show(1, now)
    assert drawing.acts == ["draw", "clear"]
    kept.writelines([" a line\n"])
    shown.show(1, now)
    shown.end(1)
    assert drawing.acts == ["draw", "clear", "clear", "draw", "remove"] and kept.encoding == "utf-8"
    assert sys.stdout is out and sys.stderr is err and "".join(out.written) == "half a line\n"
    sys.stdout = kept  # somebody kept it, and puts it back later
    shown.show(2, now)
    assert sys.stdout is not kept and sys.stdout.stream is out
    shown.end(2)
    assert sys.stdout is out


def test_the_clock_of_a_bar_is_that_of_its_operation(capfd):
    shown = bars.make_bars(is_forced=True)
    shown.show(1, Progress("pause", ("a",), 0, 1 << 20, 3725.0))
    shown.end(1)
    assert "1:02:05" in capfd.readouterr().err


def test_a_stream_that_is_no_terminal_stays_in_its_place(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    assert terminal.install(lambda: None, None) == [] and sys.stdout is None
    terminal.uninstall()


# --- what stands for a stream ---


class Screen:
    """As programs write them: `write` returns nothing."""

    def __init__(self):
        self.text = ""

    def isatty(self):
        return True

    def write(self, text):
        self.text += text

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None


def refuse():
    raise OSError("the other stream is gone")


def test_a_print_arrives_whatever_the_stream_and_the_drawing_do(monkeypatch):
    out = Screen()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", None)
    terminal.install(refuse, make_lock())
    kept = sys.stdout
    try:
        print("a line")
        with sys.stdout as own:
            assert own is out
    finally:
        terminal.uninstall()
    assert sys.stdout is out
    kept.write("kept")  # clears nothing any more
    assert out.text == "a line\nkept"


def test_tqdms_bars_leave_the_streams_alone(monkeypatch):
    """Its one lock and ours would wait for each other."""
    out = Screen()
    monkeypatch.setattr(sys, "stdout", out)
    drawing = type("Drawing", (), {"gives_way_to_prints": False, "draw": lambda *_: None, "remove": lambda *_: None})()
    drawn = bars.Bars(drawing)
    drawn.show(1, Progress("pause", ("w",), 0, 1, 0.0))
    assert sys.stdout is out
    drawn.end(1)
    assert not bars._TqdmBars.gives_way_to_prints


def test_a_bar_follows_stderr(monkeypatch):
    drawing = type("Drawing", (), {"gives_way_to_prints": True, "clear": lambda *_: None})()
    drawn = bars.Bars(drawing)
    assert not drawn.is_of_another_stream()
    monkeypatch.setattr(sys, "stderr", Screen())
    assert drawn.is_of_another_stream()
