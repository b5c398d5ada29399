"""Progress of long operations: callbacks, and what they must not do to the operation."""

import itertools
import threading
import time
import traceback
import warnings

import pytest

torch = pytest.importorskip("torch")

from core_sim import Sim  # noqa: E402
from ebbtide.errors import StateError, StoreError  # noqa: E402
from ebbtide.saver.telling import watch  # noqa: E402
from interrupts import interrupted_everywhere  # noqa: E402
from progress_model import BLOCK, SIZE, block, hold, settled, short_thresholds, wait_until  # noqa: E402

pytestmark = pytest.mark.sim_only


@pytest.fixture(autouse=True)
def _as_before(monkeypatch):
    yield from short_thresholds(monkeypatch)


def test_a_callback_hears_of_a_pause_and_a_resume(saver, tag, monkeypatch):
    keep, seen, threads = block(saver, tag), [], set()
    hold(monkeypatch, lambda: seen, lambda: seen[-1].done_bytes > 0)
    saver.configure(progress=lambda progress: (threads.add(threading.get_ident()), seen.append(progress)))
    saver.pause(tag)
    settled()
    assert {each.operation for each in seen} == {"pause"} and threading.get_ident() not in threads
    last = seen[-1]
    assert last.tags == (tag,) and last.done_bytes == last.total_bytes >= SIZE and last.seconds >= seen[0].seconds > 0
    done = [each.done_bytes for each in seen]
    assert done == sorted(done) and len(done) >= 3 and done[0] == 0
    assert "pause" in str(last) and last.to_dict()["total_bytes"] == last.total_bytes
    with pytest.raises(AttributeError):
        last.seconds = 1
    seen.clear()
    saver.resume(tag)
    settled()
    assert {each.operation for each in seen} == {"resume"}
    assert seen[-1].done_bytes == seen[-1].total_bytes >= SIZE
    assert int(keep[-1]) == BLOCK - 1


def test_a_swap_counts_both_sides_and_every_tag_is_none_named(saver, tag, tag2, monkeypatch):
    keep, other, seen = block(saver, tag), block(saver, tag2), []
    saver.pause(tag)
    hold(monkeypatch, lambda: seen, lambda: seen[-1].done_bytes > 0)
    saver.configure(progress=seen.append)
    saver.swap(pause=tag2, resume=tag)
    settled()
    assert seen[-1].operation == "swap" and seen[-1].tags == (tag2, tag)
    assert seen[-1].done_bytes == seen[-1].total_bytes >= 2 * SIZE
    seen.clear()
    saver.resume()
    settled()
    assert seen[-1].operation == "resume" and seen[-1].tags == ()
    assert int(keep[-1]) == int(other[-1]) == BLOCK - 1


def test_other_operations_tell_too(saver, tag, monkeypatch):
    keep, seen = block(saver, tag), []
    hold(monkeypatch, lambda: seen)
    saver.configure(progress=seen.append)

    def pause_for_a_block():
        with saver.paused(tag):
            settled()
            seen.clear()

    acts = (
        ("resume", pause_for_a_block),
        ("demote", lambda: saver.demote(tag)),
        ("promote", lambda: saver.promote(tag)),
        ("prepare", lambda: saver.prepare(tag)),
        ("prepare", lambda: saver.prepare(tag, copy=True)),
        ("prepare", lambda: saver.prepare(tag, wait=False).wait()),
        ("prepare", lambda: saver.prepare(tag, copy=True, wait=False).wait()),
        ("pause", lambda: saver.pause(tag)),  # of what the copies would else keep on the host
        ("resume", lambda: saver.resume(tag)),
    )
    for operation, act in acts:
        seen.clear()
        act()
        settled()
        assert {each.operation for each in seen} == {operation}
        assert seen[-1].done_bytes == seen[-1].total_bytes >= SIZE
    assert int(keep[-1]) == BLOCK - 1


def test_a_resume_counts_the_handles_that_have_arrived(saver, tag):
    sim, keep, seen = Sim(), [block(saver, tag) for _ in range(6)], []
    saver.configure(shared_handle=2 * SIZE)
    try:
        saver.pause(tag)
        sim.delay("cuMemcpyHtoDAsync", 0.05)
        saver.configure(progress=seen.append)
        saver.resume(tag)
    finally:
        sim.delay("cuMemcpyHtoDAsync", 0)
        saver.configure(shared_handle="1GiB")
    settled()
    done = [each.done_bytes for each in seen]
    assert done == sorted(done) and len(set(done)) >= 3 and done[-1] == seen[-1].total_bytes >= 6 * SIZE
    assert all(int(each[-1]) == BLOCK - 1 for each in keep)


def test_a_background_resume_is_shown_once(saver, tag, monkeypatch):
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
def test_a_callback_that_fails_is_reported_once_and_not_called_again(saver, tag, monkeypatch, error):
    calls = []
    hold(monkeypatch, lambda: calls)

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


def test_a_failure_that_cannot_be_reported_ends_nothing_else(saver, tag, monkeypatch):
    keep, seen, lost = block(saver, tag), [], []
    hold(monkeypatch, lambda: seen or (lost and not watch._display))

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


def test_a_method_that_is_set_again_hears_of_the_rest(saver, tag, monkeypatch):
    """Each look at a method makes an object of its own."""

    class Listener:
        def __init__(self):
            self.seen = []

        def hear(self, progress):
            self.seen.append(progress)
            if len(self.seen) < 3:
                saver.configure(progress=self.hear)

    keep, listener = block(saver, tag), Listener()
    hold(monkeypatch, lambda: len(listener.seen) > 3)
    saver.configure(progress=listener.hear)
    saver.pause(tag)
    settled()
    assert len(listener.seen) > 3 and listener.seen[-1].done_bytes == listener.seen[-1].total_bytes
    saver.resume(tag)
    settled()
    assert int(keep[-1]) == BLOCK - 1


def test_a_callback_may_use_the_saver_and_never_holds_an_operation_up(saver, tag, tag2, monkeypatch):
    keep, other, is_free, seen = block(saver, tag), block(saver, tag2), threading.Event(), []
    hold(monkeypatch, lambda: seen)

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


def test_an_operation_that_fails_has_no_end_and_leaves_nothing(saver, tag, monkeypatch):
    keep, seen = block(saver, tag), []
    hold(monkeypatch, lambda: seen)
    saver.configure(progress=seen.append)
    with saver.region(tag), pytest.raises(StateError):
        saver.pause(tag)
    settled()
    assert seen and all(each.done_bytes < each.total_bytes for each in seen)
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


def test_without_a_thread_an_operation_is_not_shown(saver, tag, monkeypatch):
    def refuse(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(watch._thread, "start_new_thread", refuse)
    keep, seen = block(saver, tag), []
    saver.configure(progress=seen.append)
    saver.pause(tag)
    saver.resume(tag)
    assert seen == [] and int(keep[-1]) == BLOCK - 1


def test_calls_are_at_most_ten_a_second(saver, tag, monkeypatch):
    monkeypatch.setattr(watch, "POLL_SECONDS", 0.1)
    keep, seen = block(saver, tag), []
    saver.configure(progress=seen.append)
    with watch.watched("pause", [tag]):
        wait_until(lambda: len(seen) == 3)
    settled()
    gaps = [later.seconds - earlier.seconds for earlier, later in itertools.pairwise(seen[:3])]
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
