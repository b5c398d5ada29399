"""pause, resume, paused, reports and queries."""

import signal
import threading
import time

import pytest

torch = pytest.importorskip("torch")

from core_sim import UNKNOWN, Sim  # noqa: E402
from ebbtide import _core  # noqa: E402
from ebbtide.errors import DriverError, OutOfMemoryError, StateError, StoreError  # noqa: E402
from ebbtide.saver.operations import hooked_operation  # noqa: E402

MIB = 1 << 20


def block(saver, tag, mib, value=1.0, **options):
    with saver.region(tag, **options):
        return torch.full((mib * MIB // 4,), value, device=saver.device)


def test_invariant_1_and_2_same_addresses_same_bytes(saver, tag):
    with saver.region(tag):
        tensors = [torch.randn(size, device=saver.device) for size in (1, 100, 10_000, 1_000_000, 4_000_000)]
    views = [t[1:] for t in tensors]
    want = [t.cpu().clone() for t in tensors]
    addresses = [t.data_ptr() for t in tensors]
    paused = saver.pause(tag)
    resumed = saver.resume(tag)
    assert [t.data_ptr() for t in tensors] == addresses
    assert all(torch.equal(t.cpu(), w) for t, w in zip(tensors, want, strict=True))
    assert all(torch.equal(v.cpu(), w[1:]) for v, w in zip(views, want, strict=True))
    assert paused.bytes == resumed.bytes == paused.by_tag[tag]
    assert paused.kind == "pause"
    assert resumed.kind == "resume"


def test_reports_count_and_read_well(saver, tag, tag2):
    keep = [block(saver, tag, 16), block(saver, tag2, 32)]
    report = saver.pause(tag)
    assert report.by_tag == {tag: report.bytes}
    assert sum(report.by_device.values()) == report.bytes == 16 * MIB
    assert report.copied + report.skipped >= 16 * MIB
    assert report.seconds >= 0
    assert {(held.tag, held.bytes) for held in report.remaining if held.tag in (tag, tag2)} == {(tag2, 32 * MIB)}
    assert "freed 16.0 MiB" in str(report)
    assert f"{tag2} 32.0 MiB" in str(report)
    back = saver.resume(tag)
    assert "claimed 16.0 MiB" in str(back)
    del keep


def test_no_argument_means_every_tag(saver, tag, tag2):
    first, second = block(saver, tag, 2), block(saver, tag2, 2)
    report = saver.pause()
    assert {tag, tag2} <= set(report.by_tag)
    assert saver.is_paused(tag) and saver.is_paused(tag2)
    saver.resume()
    assert float(first.sum() + second.sum()) == 2 * 2 * MIB // 4


def test_twice_is_once(saver, tag):
    keep = block(saver, tag, 4)
    saver.pause(tag, tag)
    again = saver.pause(tag)
    assert (again.bytes, again.by_tag) == (0, {})
    saver.resume(tag)
    again = saver.resume(tag)
    assert (again.bytes, again.by_tag) == (0, {})
    assert float(keep.sum()) == MIB


def test_resume_of_what_was_never_paused(saver, tag):
    keep = block(saver, tag, 4)
    assert saver.resume(tag).bytes == 0
    assert float(keep[0]) == 1


def test_an_unknown_tag_lists_the_known_ones_and_nothing_moves(saver, tag, tag2):
    keep = block(saver, tag, 12)
    for call in (saver.pause, saver.resume, saver.is_paused):
        with pytest.raises(StateError, match=tag):
            call(tag2) if call is saver.is_paused else call(tag, tag2)
    assert not saver.is_paused(tag)
    assert saver.pause(tag2, missing_ok=True).bytes == 0
    assert saver.pause(tag, tag2, missing_ok=True).bytes == 12 * MIB
    saver.resume(tag, tag2, missing_ok=True)
    assert float(keep[0]) == 1
    assert tag2 not in saver.tags()


def test_a_tag_with_nothing_in_it_is_an_empty_report(saver, tag):
    with saver.region(tag):
        pass
    assert saver.pause(tag).bytes == saver.resume(tag).bytes == 0
    assert saver.tags()[tag].state == "empty"


def test_invariant_2_without_a_backup_zeros_come_back(saver, tag):
    keep = block(saver, tag, 12, backup=None)
    report = saver.pause(tag)
    assert (report.bytes, report.copied) == (12 * MIB, 0)
    saver.resume(tag)
    assert int(torch.count_nonzero(keep)) == 0


def test_backup_this_once(saver, tag, tag2):
    kept, dropped = block(saver, tag, 4, backup=None), block(saver, tag2, 4)
    saver.pause(tag, backup="ram")
    saver.pause(tag2, backup=None)
    saver.resume(tag, tag2)
    assert float(kept.sum()) == MIB
    assert int(torch.count_nonzero(dropped)) == 0
    saver.pause(tag, tag2)  # the policies themselves have not changed
    saver.resume(tag, tag2)
    assert int(torch.count_nonzero(kept)) == 0


def test_memory_freed_while_paused_never_comes_back(saver, tag):
    keep, gone = block(saver, tag, 4), block(saver, tag, 32)
    saver.pause(tag)
    del gone
    saver.resume(tag)
    assert float(keep[0]) == 1


def test_paused_is_for_the_length_of_a_with(saver, tag, tag2):
    keep, other = block(saver, tag, 4), block(saver, tag2, 4)
    saver.pause(tag2)
    with saver.paused(tag, tag2) as report:
        assert saver.is_paused(tag)
        assert set(report.by_tag) == {tag}
    assert not saver.is_paused(tag)
    assert saver.is_paused(tag2)  # it was paused before
    saver.resume(tag2)
    with pytest.raises(KeyError), saver.paused(tag):
        raise KeyError
    assert float(keep[0]) == float(other[0]) == 1


def test_out_of_memory_in_resume_moves_nothing_and_works_once_there_is_room(saver, tag, tag2):
    saver.trim()  # what other tests have cached would make room
    keep, other = block(saver, tag, 16), block(saver, tag2, 16)
    saver.pause(tag, tag2)
    held = sum(size for size in (held.bytes for held in saver.pause(tag).remaining))
    saver.configure(device_limit=held + 24 * MIB)
    with pytest.raises(torch.OutOfMemoryError) as error:
        saver.resume(tag, tag2)
    assert isinstance(error.value, OutOfMemoryError)
    assert error.value.requested_bytes >= 16 * MIB
    assert error.value.limit_bytes == held + 24 * MIB
    assert saver.is_paused(tag) and saver.is_paused(tag2)
    assert saver.resume(tag).bytes == 16 * MIB
    saver.configure(device_limit=None)
    assert saver.resume(tag, tag2).bytes == 16 * MIB
    assert float(keep.sum() + other.sum()) == 2 * 4 * MIB


def test_resume_keeps_trying_for_its_timeout(saver, tag):
    keep = block(saver, tag, 16)
    saver.pause(tag)
    saver.configure(device_limit=1)
    start = time.monotonic()
    with pytest.raises(OutOfMemoryError, match=r"\(tried for 0\.3 s\)$"):
        saver.resume(tag, timeout=0.3)
    assert 0.3 <= time.monotonic() - start < 5
    timer = threading.Timer(0.3, lambda: saver.configure(device_limit=None))
    timer.start()
    assert saver.resume(tag, timeout=60).bytes == 16 * MIB
    timer.join()
    assert time.monotonic() - start < 30
    assert float(keep[0]) == 1


def test_ctrl_c_ends_the_waiting_and_leaves_state_whole(saver, tag):
    keep = block(saver, tag, 16)
    saver.pause(tag)
    saver.configure(device_limit=1)
    timer = threading.Timer(0.3, signal.raise_signal, [signal.SIGINT])
    timer.start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        saver.resume(tag, timeout=60)
    timer.join()
    assert time.monotonic() - start < 30
    saver.configure(device_limit=None)
    saver.resume(tag)
    assert float(keep[0]) == 1


def test_a_host_limit_stops_a_pause_before_anything_moves(saver, tag):
    keep = block(saver, tag, 64)
    saver.configure(host_limit="1MiB")
    with pytest.raises(StoreError) as error:
        saver.pause(tag)
    assert error.value.requested_bytes >= 64 * MIB
    assert error.value.limit_bytes == MIB
    assert not saver.is_paused(tag)
    assert float(keep.sum()) == 16 * MIB
    assert saver.pause(tag, backup=None).bytes == 64 * MIB
    saver.configure(host_limit=None)
    saver.resume(tag)


def test_out_of_memory_in_a_region_is_torchs_and_the_region_stays_usable(saver, tag):
    limit = _core.query_device(0).held_bytes + 200 * MIB
    saver.configure(device_limit=limit)
    with saver.region(tag):
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(limit // 4 + MIB, device=saver.device)  # does not fit, whatever torch releases
        keep = torch.ones(MIB, device=saver.device)
    assert float(keep[0]) == 1
    assert any(event.kind == "out_of_memory" for event in saver.timeline)


def test_tags_and_stats_and_timeline(saver, tag):
    keep = block(saver, tag, 12)
    before = saver.stats()
    saver.pause(tag)
    row = saver.tags()[tag]
    assert (row.state, row.size_bytes, row.resident_bytes, row.stored_bytes, row.dropped_bytes) == (
        "paused",
        12 * MIB,
        0,
        12 * MIB,
        0,
    )
    assert tag in str(saver.tags()) and "12.0 MiB" in str(saver.tags())
    saver.resume(tag)
    after = saver.stats()
    assert after["pauses"] == before["pauses"] + 1
    assert after["bytes_paused"] == before["bytes_paused"] + 12 * MIB
    kinds = [event.kind for event in saver.timeline if event.tags == tag]
    assert kinds == ["pause", "resume"]
    assert f"pause {tag}: 12.0 MiB" in str(next(event for event in saver.timeline if event.tags == tag))
    del keep


def test_workspaces_are_forgotten_before_each_pause(saver, tag, monkeypatch):
    keep, calls = block(saver, tag, 2), []
    monkeypatch.setattr(hooked_operation.workspaces, "clear", lambda: calls.append(saver.is_paused(tag)))
    saver.pause(tag)
    saver.resume(tag)
    assert calls == [False]
    del keep


def test_the_cublas_map_is_emptied_only_where_torch_uses_cuda(monkeypatch):
    from ebbtide import driver_choice
    from ebbtide.saver.pools import workspaces
    from ebbtide.saver.reclaim import torch_cache

    calls = []
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: calls.append(1), raising=False)
    for cuda, is_initialized, driver in ((None, True, "cuda"), ("13.0", False, "cuda"), ("13.0", True, "sim")):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda answer=is_initialized: answer)
        monkeypatch.setattr(driver_choice, "_chosen", driver)
        workspaces.clear()
        assert not torch_cache.empty()
    assert calls == []
    for driver in ("cuda", None):  # None: memory that is paused before any region was entered
        monkeypatch.setattr(driver_choice, "_chosen", driver)
        workspaces.clear()
    assert calls == [1, 1]


def test_paused_brings_back_what_it_moved_and_nothing_else(saver, tag):
    """Per allocation: a tag that was partly paused before is so again. Allocations that died or were resumed meanwhile
    are skipped."""
    with saver.region(tag):
        away = torch.full((3 * MIB,), 1, dtype=torch.uint8, device=saver.device)
    saver.pause(tag)
    with saver.region(tag):
        here = torch.full((3 * MIB,), 2, dtype=torch.uint8, device=saver.device)
        dying = torch.full((30 * MIB,), 3, dtype=torch.uint8, device=saver.device)
    with saver.paused(tag) as report:
        assert report.bytes
        assert is_away(here) and is_away(dying) and is_away(away)
        del dying
        with saver.region(tag):
            fresh = torch.full((3 * MIB,), 4, dtype=torch.uint8, device=saver.device)
    assert not is_away(here) and not is_away(fresh) and is_away(away)
    assert (int(here[-1]), int(fresh[-1])) == (2, 4)
    with saver.paused(tag):
        saver.resume(tag)
    assert not is_away(here) and not is_away(away)
    assert int(away[-1]) == 1


def is_away(tensor):
    return _core.is_away(tensor.data_ptr(), tensor.nbytes)


def test_paused_of_all_tags_leaves_paused_ones_alone(saver, tag, tag2):
    with saver.region(tag):
        first = torch.ones(1000, device=saver.device)
    with saver.region(tag2):
        second = torch.ones(1000, device=saver.device)
    saver.pause(tag)
    with saver.paused():
        assert is_away(first) and is_away(second)
    assert is_away(first) and not is_away(second)


@pytest.mark.sim_only
def test_paused_puts_back_what_a_pause_that_failed_midway_moved(saver, tag):
    sim = Sim()
    with saver.region(tag):
        blocks = [torch.full((20 * MIB,), value, dtype=torch.uint8, device=saver.device) for value in (1, 2, 3)]
    saver.configure(shared_handle=0)
    try:
        sim.fail("cuMemUnmap", 2, UNKNOWN)
        with pytest.raises(DriverError), saver.paused(tag):
            raise AssertionError
        sim.clear_failures()
        assert not any(is_away(block) for block in blocks)
        assert [int(block[-1]) for block in blocks] == [1, 2, 3]
        assert saver.tags()[tag].state == "resident"
    finally:
        sim.clear_failures()
        saver.configure(shared_handle="1GiB")


def test_paused_is_a_decorator_too(saver, tag):
    with saver.region(tag):
        keep = torch.ones(1000, device=saver.device)

    @saver.paused(tag)
    def look(number):
        assert is_away(keep)
        return number

    assert [look(number) for number in range(3)] == [0, 1, 2]
    assert not is_away(keep)
    once = saver.paused(tag)
    with once:
        pass
    with pytest.raises(StateError, match="entered once"):
        once.__enter__()
