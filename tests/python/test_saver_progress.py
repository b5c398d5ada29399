"""Progress of long operations: callbacks, and what they must not do to the operation."""

import itertools
import threading
import time
import traceback
import warnings

import pytest

torch = pytest.importorskip("torch")

from ebbtide.errors import StateError, StoreError  # noqa: E402
from ebbtide.saver.telling import watch  # noqa: E402
from interrupts import interrupted_everywhere  # noqa: E402
from progress_model import (  # noqa: E402
    BLOCK,
    SIZE,
    block,
    settled,
    short_thresholds,
    simulator,
    slow_operations,
    wait_until,
)

pytestmark = pytest.mark.sim_only  # the simulator's delays make operations long


@pytest.fixture
def sim():
    yield from simulator()


@pytest.fixture(autouse=True)
def _as_before(monkeypatch):
    yield from short_thresholds(monkeypatch)


@pytest.fixture
def slow(sim):
    yield from slow_operations(sim)


def test_a_callback_hears_of_a_pause_and_a_resume(saver, tag, slow):
    keep, seen = block(saver, tag), []
    saver.configure(progress=lambda progress: seen.append((progress, threading.get_ident())))
    saver.pause(tag)
    settled()
    assert {each.operation for each, _ in seen} == {"pause"} and threading.get_ident() not in {
        thread for _, thread in seen
    }
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


@pytest.mark.parametrize(
    "way", ["paused", "wait", "prepare", "prepare in a thread", "copy", "copy in a thread", "demote", "promote"]
)
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
        sim.delay("cuMemcpyHtoDAsync", 0.3)
        sim.delay("cuMemMap", 0.3)
        sim.delay("cuStreamQuery", 0.1)
    sim.delay("cuMemcpyDtoHAsync", 0.3 if way.startswith("copy") else 0)
    acts = {
        "paused": lambda: saver.paused(tag).__enter__() and None,
        "wait": lambda: saver.resume(tag, wait=False).wait(),
        "prepare": lambda: saver.prepare(tag),
        "prepare in a thread": lambda: saver.prepare(tag, wait=False).wait(),
        "copy": lambda: saver.prepare(tag, copy=True),
        "copy in a thread": lambda: saver.prepare(tag, copy=True, wait=False).wait(),
        "demote": lambda: saver.demote(tag),
        "promote": lambda: saver.promote(tag),
    }
    if way == "paused":
        with saver.paused(tag):
            pass
    else:
        acts[way]()
    for name in ("cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync", "cuMemMap", "cuStreamQuery"):
        sim.delay(name, 0)
    settled()
    expected = {"paused": "resume", "wait": "resume", "prepare in a thread": "prepare"}.get(way, way)
    expected = "prepare" if way.startswith("copy") else expected
    if way.startswith("copy"):  # the copies of this tag would give way in the tests to come
        done = list(seen)
        saver.pause(tag)
        saver.resume(tag)
        settled()
        seen = done
    if way != "wait":  # there its bytes may have come before the thread looks
        assert seen and seen[-1].operation == expected
        assert seen[-1].done_bytes == seen[-1].total_bytes >= SIZE
    assert int(keep[-1]) == BLOCK - 1


def test_a_resume_counts_the_handles_that_have_arrived(saver, tag, sim):
    keep, seen = [block(saver, tag) for _ in range(6)], []
    saver.configure(shared_handle=2 * SIZE)
    try:
        saver.pause(tag)
        sim.delay("cuMemcpyHtoDAsync", 0.1)
        saver.configure(progress=seen.append)
        saver.resume(tag)
    finally:
        sim.delay("cuMemcpyHtoDAsync", 0)
        saver.configure(shared_handle="1GiB")
    settled()
    done = [each.done_bytes for each in seen]
    assert done == sorted(done) and len(set(done)) >= 3 and done[-1] == seen[-1].total_bytes >= 6 * SIZE
    assert all(int(each[-1]) == BLOCK - 1 for each in keep)


def test_a_background_resume_is_shown_once(saver, tag, sim, monkeypatch):
    """Not its claim first, which would end at all bytes before one has moved."""
    keep, watched = block(saver, tag), []
    monkeypatch.setattr(watch._Watch, "_open", lambda self: watched.append(self._pending is not None))
    saver.configure(progress=print)
    saver.pause(tag)
    watched.clear()
    saver.resume(tag, wait=False).wait()
    assert False not in watched
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
    wait_until(lambda: seen)
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


def test_a_failure_that_cannot_be_reported_ends_nothing_else(saver, tag, slow, monkeypatch):
    keep, seen, lost = block(saver, tag), [], []

    def fail(*_args, **_options):
        lost.append(1)
        raise OSError("no terminal")

    monkeypatch.setattr(warnings, "warn", fail)
    monkeypatch.setattr(traceback, "print_exception", fail)
    saver.configure(progress=fail)
    saver.pause(tag)
    settled()
    assert lost == [1, 1, 1] and saver.settings()["progress"] is False
    saver.configure(progress=seen.append)
    saver.resume(tag)
    settled()
    assert seen[-1].operation == "resume" and seen[-1].done_bytes == seen[-1].total_bytes >= SIZE
    assert int(keep[-1]) == BLOCK - 1


def test_a_method_that_is_set_again_hears_of_the_rest(saver, tag, slow):
    """Each look at a method makes an object of its own."""

    class Listener:
        def __init__(self):
            self.seen = []

        def hear(self, progress):
            self.seen.append(progress)
            if len(self.seen) < 3:
                saver.configure(progress=self.hear)

    keep, listener = block(saver, tag), Listener()
    saver.configure(progress=listener.hear)
    saver.pause(tag)
    settled()
    assert len(listener.seen) > 3 and listener.seen[-1].done_bytes == listener.seen[-1].total_bytes
    saver.resume(tag)
    settled()
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


def test_short_operations_are_not_told_and_start_no_thread_where_nothing_would_be_shown(saver, tag, monkeypatch):
    monkeypatch.setattr(watch, "CALLBACK_SECONDS", 30)
    keep, seen = block(saver, tag), []
    with monkeypatch.context() as without_threads:
        without_threads.setattr(watch._thread, "start_new_thread", lambda *_: pytest.fail("a thread"))
        for display in (None, False):  # stderr is no terminal here
            saver.configure(progress=display)
            saver.pause(tag)
            saver.resume(tag)
    saver.configure(progress=seen.append)
    saver.pause(tag)
    saver.resume(tag)
    settled()
    assert seen == [] and int(keep[-1]) == BLOCK - 1


def test_without_a_thread_an_operation_is_not_shown(saver, tag, slow, monkeypatch):
    def refuse(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(watch._thread, "start_new_thread", refuse)
    keep, seen = block(saver, tag), []
    saver.configure(progress=seen.append)
    saver.pause(tag)
    saver.resume(tag)
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
    with pytest.raises(TypeError, match="progress must be a callable, False or None, not True"):
        saver.configure(progress=True, skip_clean=False)
    before = saver.settings()
    assert before["progress"] is None and before["skip_clean"] is True
    saver.configure(progress=False)
    assert saver.settings()["progress"] is False
    saver.configure(progress=before["progress"])
    assert saver.settings()["progress"] is None


def test_an_interrupt_anywhere_leaves_no_operation_that_seems_to_run(saver, tag):
    keep = block(saver, tag)
    saver.configure(progress=lambda progress: None)

    def work():
        with watch.watched("pause", [tag]):
            pass

    def check():
        settled()
        in_other = []

        def take():
            with watch._lock:
                in_other.append(True)

        thread = threading.Thread(target=take)
        thread.start()
        thread.join(10)
        assert in_other == [True]

    assert interrupted_everywhere(work, check) > 10
    time.sleep(0.1)  # a thread that starts late
    settled()
    assert int(keep[-1]) == BLOCK - 1
