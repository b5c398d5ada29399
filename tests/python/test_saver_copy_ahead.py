"""saver.prepare(copy=True): a pause copies only what has changed since."""

import gc
import time

import pytest

torch = pytest.importorskip("torch")

from ebbtide.errors import StateError, StoreError  # noqa: E402
from random_memory import random_bytes  # noqa: E402

MIB = 1 << 20


@pytest.fixture(autouse=True)
def nothing_is_left_that_gives_way(saver):
    """Else tests of other files, in this process, would find more host memory than their limit allows."""
    yield
    gc.collect()
    saver.trim()
    for tag in ahead(saver):  # of tensors that other files left alive: a backup that is kept has their bytes, too
        with saver.paused(tag):
            pass
    assert not ahead(saver)


def ahead(saver):
    return {tag: row.ahead_bytes for tag, row in saver.tags().items() if row.ahead_bytes}


def noise(saver, tag, mib, **options):
    with saver.region(tag, **options):
        return random_bytes(mib * MIB, saver.device)


@pytest.fixture
def small_steps(monkeypatch):
    """Steps of a thread that copies are a quarter as large as they are."""
    from ebbtide.saver.copying import paced

    monkeypatch.setattr(paced, "_SMALL_STEP", 8 * MIB)


def until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.01)


@pytest.mark.parametrize(("backup", "wait"), [("ram", True), ("ram", False), ("pinned", False), ("disk", True)])
def test_the_first_pause_copies_nothing(saver, tag, backup, wait):
    keep = noise(saver, tag, 40, backup=backup)
    want = keep.cpu().clone()
    made = saver.prepare(tag, copy=True, wait=wait)
    report = made if wait else made.wait()
    assert (report.kind, report.copied, report.bytes) == ("prepare", 40 * MIB, 40 * MIB)
    assert report.by_tag == {tag: 40 * MIB}
    assert "made ready 40.0 MiB" in str(report) and "40.0 MiB copied" in str(report)
    status = saver.tags()[tag]
    assert (status.state, status.ahead_bytes) == ("resident", 40 * MIB)
    assert "ahead" in str(saver.tags())
    paused = saver.pause(tag)
    assert (paused.copied, paused.clean) == (0, 40 * MIB)
    assert saver.tags()[tag].ahead_bytes == 0
    saver.resume(tag)
    assert torch.equal(keep.cpu(), want)


def test_what_changes_afterwards_is_copied(saver, tag):
    keep = noise(saver, tag, 16)
    saver.prepare(tag, copy=True)
    keep[5 * MIB] += 1
    want = keep.cpu().clone()
    paused = saver.pause(tag)
    assert paused.copied == 2 * MIB
    saver.resume(tag)
    assert torch.equal(keep.cpu(), want)


@pytest.mark.usefixtures("quick_scans")
def test_explain_names_what_changed_since(saver, tag):
    keep = noise(saver, tag, 16)
    saver.prepare(tag, copy=True)
    keep[0] += 1
    saver.pause(tag)
    saver.resume(tag)
    explained = saver.explain(tag)
    assert "changed" in str(explained)


def test_a_second_call_copies_what_changed(saver, tag):
    keep = noise(saver, tag, 16)
    assert saver.prepare(tag, copy=True).copied == 16 * MIB
    keep[0] += 1
    again = saver.prepare(tag, copy=True)
    assert (again.copied, again.clean, again.bytes) == (2 * MIB, 14 * MIB, 16 * MIB)
    assert saver.pause(tag).copied == 0
    saver.resume(tag)


def test_several_tags_and_all(saver, tag):
    one, two = noise(saver, f"{tag}.one", 8), noise(saver, f"{tag}.two", 8)
    report = saver.prepare(f"{tag}.one", f"{tag}.two", copy=True)
    assert report.by_tag == {f"{tag}.one": 8 * MIB, f"{tag}.two": 8 * MIB}
    assert not {f"{tag}.one", f"{tag}.two"} & {row.tag for row in saver.prepare(copy=True).rows if row.copied}
    assert one.numel() == two.numel()


def test_what_torch_holds_free_is_not_copied(saver, tag):
    keep = noise(saver, tag, 20)
    gone = noise(saver, tag, 30)
    del gone
    report = saver.prepare(tag, copy=True)
    assert (report.copied, report.unused) == (20 * MIB, 30 * MIB)
    again = noise(saver, tag, 30)  # in the memory that was left out
    want = again.cpu().clone()
    assert saver.pause(tag).copied == 30 * MIB
    saver.resume(tag)
    assert torch.equal(again.cpu(), want)
    assert keep.numel()


def test_what_is_refused(saver, tag):
    for wait in (True, False):
        with pytest.raises(StateError, match="no region"):
            saver.prepare(f"{tag}-unknown", copy=True, wait=wait)
        with pytest.raises(ValueError):
            saver.prepare("a/b", copy=True, wait=wait)
        with pytest.raises(TypeError, match="copy is True or False"):
            saver.prepare(tag, copy=1, wait=wait)
    assert saver.prepare(f"{tag}-unknown", copy=True, missing_ok=True).bytes == 0
    assert saver.prepare(f"{tag}-unknown", copy=True, missing_ok=True, wait=False).wait().bytes == 0


def test_no_backup_and_no_digests(saver, tag):
    keep = noise(saver, tag, 8, backup=None)
    assert saver.prepare(tag, copy=True).bytes == 0
    other = noise(saver, f"{tag}.ram", 8)
    saver.configure(skip_clean=False)
    report = saver.prepare(f"{tag}.ram", copy=True)
    assert report.copied == 0 and "skip_clean" in report.note and "skip_clean" in str(report)
    saver.configure(skip_clean=True)
    assert keep.numel() == other.numel()


def test_too_little_room_keeps_what_was_copied(saver, tag, monkeypatch):
    from ebbtide.saver.copying import paced

    monkeypatch.setattr(paced, "_LARGE_STEP", 8 * MIB)
    warm = noise(saver, f"{tag}.warm", 8)
    saver.prepare(f"{tag}.warm", copy=True)  # which makes the ring
    keep = noise(saver, tag, 24)
    want = keep.cpu().clone()
    saver.configure(host_limit=saver.stats()["host_held_bytes"] + 10 * MIB)
    with pytest.raises(StoreError):
        saver.prepare(tag, copy=True)
    assert saver.tags()[tag].ahead_bytes == 8 * MIB
    saver.configure(host_limit=None)
    assert saver.pause(tag).copied == 16 * MIB
    saver.resume(tag)
    assert torch.equal(keep.cpu(), want)
    assert warm.numel()


def test_a_pause_in_the_middle_takes_over(saver, tag, small_steps):
    keep = noise(saver, tag, 40)
    want = keep.cpu().clone()
    made = saver.prepare(tag, copy=True, wait=False)
    until(lambda: saver.tags()[tag].ahead_bytes > 0 or made.done)
    paused = saver.pause(tag)
    assert paused.clean >= 8 * MIB
    assert paused.clean + paused.copied == 40 * MIB
    assert made.wait().copied <= paused.clean
    saver.resume(tag)
    assert torch.equal(keep.cpu(), want)


def test_stop_ends_it_and_keeps_what_is_there(saver, tag, small_steps):
    keep = noise(saver, tag, 40)
    made = saver.prepare(tag, copy=True, wait=False)
    made.stop()
    report = made.wait()
    assert made.done and report.copied < 40 * MIB
    assert saver.tags()[tag].ahead_bytes == report.copied
    made.stop()
    memory_alone = saver.prepare(tag, wait=False)
    memory_alone.stop()
    memory_alone.wait()
    assert keep.numel()


def test_training_beside_it(saver, tag):
    with saver.region(tag):
        model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8))).to(saver.device)
    twin = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8))).to(saver.device)
    twin.load_state_dict(model.state_dict())
    torch.manual_seed(0)
    data = torch.randn(64, 512, device=saver.device)

    def train(which, steps):
        optimizer = torch.optim.SGD(which.parameters(), lr=0.01)
        for _ in range(steps):
            optimizer.zero_grad()
            which(data).square().mean().backward()
            optimizer.step()

    for _ in range(3):
        made = saver.prepare(tag, copy=True, wait=False)
        train(model, 5)
        made.wait()
        saver.pause(tag)
        saver.resume(tag)
    train(twin, 15)
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_allocations_and_frees_beside_it(saver, tag, small_steps):
    keep = noise(saver, tag, 32)
    want = keep.cpu().clone()
    made = saver.prepare(tag, copy=True, wait=False)
    for _ in range(20):
        noise(saver, tag, 4)
    made.wait()
    saver.pause(tag)
    saver.resume(tag)
    assert torch.equal(keep.cpu(), want)


def test_a_capture_holds_it_up(saver, tag):
    from ebbtide import _core

    keep = noise(saver, tag, 16)
    capture = _core.Frame()
    capture.begin_capture()
    try:
        with pytest.raises(StateError, match="capture"):
            saver.prepare(tag, copy=True)
        made = saver.prepare(tag, copy=True, wait=False)
        time.sleep(0.1)
        assert not made.done
        assert saver.tags()[tag].ahead_bytes == 0
    finally:
        capture.close()
    assert made.wait().copied == 16 * MIB
    assert keep.numel()


def test_a_view_is_left_alone(saver, tag):
    keep = noise(saver, tag, 8, retain=True)
    want = keep.cpu().clone()
    saver.pause(tag)
    view = saver.backup_of(keep)
    saver.resume(tag)
    keep.fill_(3)
    saver.prepare(tag, copy=True)
    assert torch.equal(view, want)
    saver.pause(tag)
    saver.resume(tag)
    assert bool((keep == 3).all())


def test_what_was_copied_ahead_gives_way_to_the_pause_of_another_tag(saver, tag):
    ahead, other = noise(saver, f"{tag}.ahead", 24), noise(saver, f"{tag}.other", 24)
    want = other.cpu().clone()
    saver.prepare(f"{tag}.ahead", copy=True)

    def bytes_ahead():
        return sum(row.ahead_bytes for row in saver.tags().values())  # of other tests, too

    before = bytes_ahead()
    saver.configure(host_limit=saver.stats()["host_held_bytes"] + 8 * MIB)
    try:
        assert saver.pause(f"{tag}.other").copied == 24 * MIB
        assert bytes_ahead() <= before - 16 * MIB
        saver.resume(f"{tag}.other")
    finally:
        saver.configure(host_limit=None)
    assert torch.equal(other.cpu(), want)
    paused = saver.pause(f"{tag}.ahead")
    assert paused.copied + paused.clean == 24 * MIB
    saver.resume(f"{tag}.ahead")
    assert ahead.numel()


def test_each_tag_has_a_best_rate_of_its_own():
    from ebbtide.saver.copying.paced import PacedCopy

    copying = PacedCopy()
    for _ in range(3):
        assert copying._rest_after("fast", 32 * MIB, 0.008) == pytest.approx(0.002)
        assert copying._rest_after("slow", 32 * MIB, 0.040) == pytest.approx(0.010), "slow for its kind alone"
    assert copying._rest_after("fast", 32 * MIB, 0.016) == pytest.approx(0.050), "slowed: the program goes first"
    assert copying._rest_after("fast", 0, 0.0001) == pytest.approx(0.001)


@pytest.mark.parametrize("ending", ["raise SystemExit(0)", "del done", "saver.pause('w')", "done.wait()"])
def test_the_process_may_end_in_the_middle(run_python, ending):
    result = run_python(
        f"""
        import torch
        from ebbtide import saver
        with saver.region("w"):
            x = torch.empty(8 << 20, dtype=torch.int64, device=saver.device).random_()
        done = saver.prepare("w", copy=True, wait=False)
        {ending}
        """,
        whole_exit=True,
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_a_fork_in_the_middle(run_python):
    result = run_python(
        """
        import os, sys, torch
        from ebbtide import saver
        from ebbtide.errors import StateError
        with saver.region("w"):
            x = torch.empty(8 << 20, dtype=torch.int64, device=saver.device).random_()
        want = x.clone()
        done = saver.prepare("w", copy=True, wait=False)
        child = os.fork()
        if child == 0:
            try:
                done.wait()
            except StateError:
                sys.exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        done.wait()
        assert saver.pause("w").copied == 0
        saver.resume("w")
        assert torch.equal(x, want)
        """
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_where_ebbtide_is_off(run_python):
    result = run_python(
        """
        from ebbtide import saver
        assert saver.prepare("w", copy=True).bytes == 0
        done = saver.prepare("w", copy=True, wait=False)
        done.stop()
        assert done.wait().bytes == 0 and done.done
        """,
        EBBTIDE_DRIVER="off",
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_where_no_thread_starts_it_is_done_at_once(saver, tag, monkeypatch):
    from ebbtide.saver.copying import paced

    def refuse(_copying, _thread):
        raise RuntimeError("can't start new thread")

    keep = noise(saver, tag, 16)
    monkeypatch.setattr(paced.PacedCopy, "start", refuse)
    done = saver.prepare(tag, copy=True, wait=False)
    assert done.done
    assert done.wait().copied == 16 * MIB
    assert keep.numel()
