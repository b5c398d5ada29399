"""Progress of long operations: callbacks, bars, and what it must not do to the operation."""

import itertools
import sys
import threading
import time

import pytest

torch = pytest.importorskip("torch")

from ebbtide import saver as saver_module  # noqa: E402
from ebbtide.errors import StateError, StoreError  # noqa: E402
from ebbtide.saver.telling import bars, watch  # noqa: E402
from interrupts import interrupted_everywhere  # noqa: E402

BLOCK = 1 << 22  # numbers of 4 bytes
SIZE = 4 * BLOCK

pytestmark = pytest.mark.sim_only  # the simulator's delays make operations long


@pytest.fixture
def sim():
    from core_sim import Sim

    made = Sim()
    yield made
    made.delay("cuMemUnmap", 0)
    made.clear_failures()


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    """Short thresholds; and afterwards the default display, no operation left and no thread."""
    monkeypatch.setattr(watch, "CALLBACK_SECONDS", 0.0)
    monkeypatch.setattr(watch, "BAR_SECONDS", 0.0)
    monkeypatch.setattr(watch, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(watch, "LINGER_SECONDS", 0.1)
    yield
    saver_module.configure(progress=None)
    wait_until(lambda: watch._watcher is None)
    assert watch._running == {} and watch._ended == []


def wait_until(is_true):
    deadline = time.monotonic() + 30
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def block(saver, tag):
    with saver.region(tag):
        return torch.arange(BLOCK, dtype=torch.int32, device=saver.device)


@pytest.fixture
def slow(sim):
    """Makes each operation that unmaps memory take a while."""
    sim.delay("cuMemUnmap", 0.3)
    sim.delay("cuMemMap", 0.3)
    yield sim
    sim.delay("cuMemMap", 0)


def settled():
    wait_until(lambda: not watch._running and not watch._ended)


def test_a_callback_hears_of_a_pause_and_a_resume(saver, tag, slow):
    keep, seen = block(saver, tag), []
    saver.configure(progress=lambda progress: seen.append((progress, threading.current_thread().name)))
    saver.pause(tag)
    settled()
    assert {each.operation for each, _ in seen} == {"pause"} and {name for _, name in seen} == {"ebbtide-progress"}
    last = seen[-1][0]
    assert last.tags == (tag,) and last.done_bytes == last.total_bytes >= SIZE and last.seconds > 0.2
    done = [each.done_bytes for each, _ in seen]
    assert done == sorted(done) and len(done) >= 3
    assert "pause" in str(last) and last.to_dict()["total_bytes"] == last.total_bytes
    with pytest.raises(AttributeError):
        last.seconds = 1
    seen.clear()
    saver.resume(tag)
    settled()
    assert {each.operation for each, _ in seen} == {"resume"}
    assert seen[-1][0].done_bytes == seen[-1][0].total_bytes >= SIZE
    assert int(keep[-1]) == BLOCK - 1


def test_a_swap_counts_both_sides_and_every_tag_is_none_named(saver, tag, tag2, slow):
    keep, other, seen = block(saver, tag), block(saver, tag2), []
    saver.configure(progress=seen.append)
    saver.pause(tag)
    settled()
    seen.clear()
    saver.swap(pause=tag2, resume=tag)
    settled()
    assert seen[-1].operation == "swap" and seen[-1].tags == (tag2, tag)
    assert seen[-1].done_bytes == seen[-1].total_bytes >= 2 * SIZE
    saver.resume()
    settled()
    assert seen[-1].operation == "resume" and seen[-1].tags == ()
    assert int(keep[-1]) == int(other[-1]) == BLOCK - 1


@pytest.mark.parametrize("way", ["paused", "wait", "prepare", "prepare in a thread", "demote", "promote"])
def test_other_operations_tell_too(saver, tag, sim, way, monkeypatch):
    """Each runs into a delay of some call that it makes."""
    from ebbtide import _core

    keep, seen = block(saver, tag), []
    if way == "wait":
        saver.pause(tag)
    if way == "promote":
        saver.demote(tag)
    saver.configure(progress=seen.append)

    def slowly(function):
        return lambda *args, **options: (time.sleep(0.2), function(*args, **options))[1]

    for name in ("prepare", "demote", "promote"):
        monkeypatch.setattr(_core, name, slowly(getattr(_core, name)))
    if way in ("paused", "wait"):
        sim.delay("cuMemcpyHtoDAsync_v2", 0.3)
        sim.delay("cuMemMap", 0.3)
        sim.delay("cuStreamQuery", 0.1)
    acts = {
        "paused": lambda: saver.paused(tag).__enter__() and None,
        "wait": lambda: saver.resume(tag, wait=False).wait(),
        "prepare": lambda: saver.prepare(tag),
        "prepare in a thread": lambda: saver.prepare(tag, wait=False).wait(),
        "demote": lambda: saver.demote(tag),
        "promote": lambda: saver.promote(tag),
    }
    if way == "paused":
        with saver.paused(tag):
            pass
    else:
        acts[way]()
    for name in ("cuMemcpyHtoDAsync_v2", "cuMemMap", "cuStreamQuery"):
        sim.delay(name, 0)
    settled()
    expected = {"paused": "resume", "wait": "resume", "prepare in a thread": "prepare"}.get(way, way)
    if way != "wait":  # there its bytes may have come before the thread looks
        assert seen and seen[-1].operation == expected
        assert seen[-1].done_bytes == seen[-1].total_bytes >= SIZE
    assert int(keep[-1]) == BLOCK - 1


@pytest.mark.parametrize("fails", [False, True])
def test_pending_bytes_are_counted_until_it_is_over(saver, tag, fails):
    class Core:
        ready = 0

        def wait(self):
            if fails:
                raise StoreError("the disk failed")

        def is_over(self):
            return self.ready > 2

        def is_ready(self, address, size):
            self.ready += 1
            return self.ready > 1

    keep, seen = block(saver, tag), []
    saver.configure(progress=seen.append)
    watch.watch_pending(Core(), [tag])
    settled()
    assert [each.done_bytes > 0 for each in seen] == [False, True, True] + [True] * (not fails)
    assert seen[-1].done_bytes == seen[-1].total_bytes >= SIZE and keep is not None


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt(), SystemExit(3)])
def test_a_callback_that_fails_is_reported_once_and_not_called_again(saver, tag, slow, error):
    calls = []

    def fail(progress):
        calls.append(progress)
        raise error

    keep = block(saver, tag)
    saver.configure(progress=fail)
    with pytest.warns(RuntimeWarning, match="progress is off from now on") as caught:
        saver.pause(tag)
        saver.resume(tag)
        settled()
    assert len(calls) == 1 and len(caught) == 1
    assert saver.settings()["progress"] is False
    assert int(keep[-1]) == BLOCK - 1


def test_a_callback_may_use_the_saver_and_never_holds_an_operation_up(saver, tag, tag2, slow):
    keep, other, is_free, seen = block(saver, tag), block(saver, tag2), threading.Event(), []

    def work(progress):
        if not seen:
            seen.append(progress)
            saver.tags(), saver.stats()
            assert is_free.wait(30)
            saver.pause(tag2)
            seen.append("paused")

    saver.configure(progress=work)
    saver.pause(tag)  # returns while the callback waits
    assert len(seen) == 1
    is_free.set()
    wait_until(lambda: len(seen) == 2)
    settled()
    assert saver.is_paused(tag2)
    saver.resume()
    assert int(keep[-1]) == int(other[-1]) == BLOCK - 1


def test_an_operation_that_fails_has_no_end_and_leaves_nothing(saver, tag, slow, sim):
    keep, seen = block(saver, tag), []
    saver.configure(progress=seen.append)
    with saver.region(tag), pytest.raises(StateError):
        saver.pause(tag)
    settled()
    assert all(each.done_bytes < each.total_bytes for each in seen)
    assert int(keep[-1]) == BLOCK - 1


def test_short_operations_are_not_told_and_start_no_thread_where_nobody_looks(saver, tag, monkeypatch):
    monkeypatch.setattr(watch, "CALLBACK_SECONDS", 30)
    keep, seen = block(saver, tag), []
    for display in (None, False):  # stderr is no terminal here
        saver.configure(progress=display)
        saver.pause(tag)
        saver.resume(tag)
        assert watch._watcher is None
    saver.configure(progress=seen.append)
    saver.pause(tag)
    saver.resume(tag)
    settled()
    assert seen == [] and int(keep[-1]) == BLOCK - 1


def test_calls_are_at_most_ten_a_second(saver, tag, slow, monkeypatch):
    monkeypatch.setattr(watch, "POLL_SECONDS", 0.1)
    keep, seen = block(saver, tag), []
    saver.configure(progress=seen.append)
    saver.pause(tag)
    settled()
    gaps = [later.seconds - earlier.seconds for earlier, later in itertools.pairwise(seen[:-1])]
    assert all(gap > 0.09 for gap in gaps) and keep is not None


def test_progress_is_a_setting_like_others(saver):
    with pytest.raises(TypeError, match="progress must be a callable, True, False or None, not str"):
        saver.configure(progress="yes", skip_clean=False)
    before = saver.settings()
    assert before["progress"] is None and before["skip_clean"] is True
    saver.configure(progress=False)
    assert saver.settings()["progress"] is False
    saver.configure(progress=before["progress"])
    assert saver.settings()["progress"] is None


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


def test_an_interrupt_anywhere_leaves_no_operation_that_seems_to_run(saver, tag):
    keep = block(saver, tag)
    saver.configure(progress=lambda progress: None)

    def work():
        with watch.Watched("pause", [tag]):
            pass

    def check():
        assert watch._running == {}
        in_other = []

        def take():
            with watch._lock:
                in_other.append(True)

        thread = threading.Thread(target=take)
        thread.start()
        thread.join(10)
        assert in_other == [True]

    assert interrupted_everywhere(work, check) > 10
    assert int(keep[-1]) == BLOCK - 1
