"""saver.configure(copy_ahead=True): a thread keeps what was resumed ahead of its next pause."""

import gc
import threading
import time
import warnings

import pytest

torch = pytest.importorskip("torch")

from random_memory import random_bytes  # noqa: E402

MIB = 1 << 20


@pytest.fixture(autouse=True)
def nothing_is_left_that_gives_way(saver):
    """Else tests of other files, in this process, would find more host memory than their limit allows."""
    yield
    gc.collect()
    saver.trim()
    for tag in ahead(saver):  # of tensors that other files left alive: a resume of everything keeps those ahead, too
        with saver.paused(tag):
            pass
    assert not ahead(saver)


def ahead(saver):
    return {tag: row.ahead_bytes for tag, row in saver.tags().items() if row.ahead_bytes}


def noise(saver, tag, mib, **options):
    with saver.region(tag, **options):
        return random_bytes(mib * MIB, saver.device)


def until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.01)


def test_every_resume_keeps_it_ahead(saver, tag):
    keep = noise(saver, tag, 32)
    want = keep.cpu().clone()
    saver.configure(copy_ahead=True)
    assert saver.settings()["copy_ahead"] is True
    try:
        for resume in (
            lambda: saver.resume(tag),
            lambda: saver.resume(tag, wait=False).wait(),
            lambda: saver.swap(pause=f"{tag}.other", resume=tag),
        ):
            other = noise(saver, f"{tag}.other", 2)
            saver.pause(tag)
            resume()
            until(lambda: saver.tags()[tag].ahead_bytes == 32 * MIB)
            assert saver.pause(tag).copied == 0
            saver.resume(tag)
            saver.resume(f"{tag}.other")
            del other
        with saver.paused(tag):
            pass
        until(lambda: saver.tags()[tag].ahead_bytes == 32 * MIB)
        keep[0] += 1
        # It copies again what changes, after a rest.
        until(lambda: saver.prepare(tag, copy=True).copied == 0)
        keep[0] -= 1
    finally:
        saver.configure(copy_ahead=False)
    saver.pause(tag)
    saver.resume(tag)
    assert torch.equal(keep.cpu(), want)


def test_a_resume_keeps_the_copies_for_the_next_pause(saver, tag):
    keep = noise(saver, tag, 32)
    saver.configure(copy_ahead=True)
    try:
        saver.pause(tag)
        saver.resume(tag)
        assert saver.tags()[tag].ahead_bytes == 32 * MIB
        before = saver.stats()["bytes_to_host"]
        keep[0] += 1
        until(lambda: saver.stats()["bytes_to_host"] > before)
        until(lambda: saver.prepare(tag, copy=True).copied == 0)
        assert saver.stats()["bytes_to_host"] == before + 2 * MIB, "only what has changed"
        saver.pause(tag)
        saver.configure(copy_ahead=False)
        saver.resume(tag, retain=False)
        assert saver.tags()[tag].retained_bytes == 0
    finally:
        saver.configure(copy_ahead=False)


def test_switching_it_off_ends_a_pass(saver, tag, monkeypatch):
    from ebbtide.saver.copying import paced

    monkeypatch.setattr(paced, "_LEAST_SLEEP", 0.05)  # a slow pass
    monkeypatch.setattr(paced, "_SMALL_STEP", 2 * MIB)
    keep = noise(saver, tag, 24)
    saver.pause(tag)
    saver.resume(tag)
    saver.configure(copy_ahead=True)
    try:
        saver.resume(tag)
        until(lambda: saver.tags()[tag].ahead_bytes > 0)
    finally:
        saver.configure(copy_ahead=False)
    until(lambda: "ebbtide-copy-ahead" not in {thread.name for thread in threading.enumerate()})
    before = saver.tags()[tag].ahead_bytes
    time.sleep(0.15)
    assert saver.tags()[tag].ahead_bytes == before < 24 * MIB
    assert keep.numel()


def test_a_resume_of_everything_keeps_ahead_what_was_ever_paused(saver, tag):
    never, once = noise(saver, f"{tag}.never", 8), noise(saver, f"{tag}.once", 8)
    saver.configure(copy_ahead=True)
    try:
        saver.pause(f"{tag}.once")
        saver.resume()
        until(lambda: saver.tags()[f"{tag}.once"].ahead_bytes == 8 * MIB)
        time.sleep(0.1)
        assert saver.tags()[f"{tag}.never"].ahead_bytes == 0
    finally:
        saver.configure(copy_ahead=False)
    assert never.numel() == once.numel()


def test_where_warnings_are_errors_the_thread_goes_on(run_python):
    result = run_python(
        """
        import time, warnings
        warnings.simplefilter("error")
        import torch
        from ebbtide import saver
        from ebbtide.saver.copying.keeper import _keeper
        def noise(tag, mib):
            with saver.region(tag):
                return torch.empty(mib << 17, dtype=torch.int64, device=saver.device).random_()
        warm, small, large = noise("warm", 32), noise("small", 4), noise("large", 64)
        saver.prepare("warm", copy=True)
        saver.configure(host_limit=saver.stats()["host_held_bytes"] + (12 << 20))
        saver.configure(copy_ahead=True)
        _keeper.keep(["large", "small"])
        end = time.monotonic() + 20
        while saver.tags()["small"].ahead_bytes < 4 << 20:
            assert time.monotonic() < end
            time.sleep(0.01)
        """
    )
    assert result.returncode == 0, result.stderr
    assert "'large' is not copied ahead" in result.stderr and "Exception in thread" not in result.stderr


def test_no_thread_begins_once_the_interpreter_ends(run_python):
    result = run_python(
        """
        import torch
        import atexit, threading
        def late():  # runs after what ebbtide registers
            from ebbtide import saver
            saver.pause("w")
            saver.resume("w")
            assert saver.prepare("w", copy=True, wait=False).done
            assert not [each for each in threading.enumerate() if each.name.startswith("ebbtide-")]
            print("resumed late", flush=True)
        atexit.register(late)
        import torch
        from ebbtide import saver
        with saver.region("w"):
            x = torch.empty(8 << 20, dtype=torch.int64, device=saver.device).random_()
        saver.configure(copy_ahead=True)
        saver.pause("w")
        saver.resume("w")
        """,
        whole_exit=True,
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "resumed late\n", "")


def test_where_the_host_is_full_it_warns_once_and_goes_on(saver, tag):
    keep = noise(saver, tag, 64)
    saver.pause(tag)
    saver.resume(tag)
    saver.configure(copy_ahead=True, host_limit=saver.stats()["host_held_bytes"] + 8 * MIB)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            saver.resume(tag)
            until(lambda: any("not copied ahead" in str(one.message) for one in caught))
    finally:
        saver.configure(copy_ahead=False, host_limit=None)
    assert keep.numel()


def test_off_costs_no_thread(saver, tag):
    keep = noise(saver, tag, 4)
    before = threading.active_count()
    saver.pause(tag)
    saver.resume(tag)
    assert threading.active_count() == before
    assert keep.numel()


def test_the_process_may_end_while_tags_are_kept_ahead(run_python):
    result = run_python(
        """
        import torch
        from ebbtide import saver
        with saver.region("w"):
            x = torch.empty(8 << 20, dtype=torch.int64, device=saver.device).random_()
        saver.configure(copy_ahead=True)
        saver.pause("w")
        saver.resume("w")
        """,
        whole_exit=True,
    )
    assert (result.returncode, result.stderr) == (0, "")
