"""Memory that torch caches and nothing uses goes back before a resume, a swap or a region is refused for lack of it."""

import threading

import pytest

torch = pytest.importorskip("torch")

from ebbtide import _core  # noqa: E402
from ebbtide.errors import OutOfMemoryError  # noqa: E402
from ebbtide.saver.pools import backends, captures  # noqa: E402
from ebbtide.saver.reclaim import advice, torch_cache  # noqa: E402

MIB = 1 << 20

pytestmark = pytest.mark.device_memory


def noise(saver, tag, mib, **options):
    with saver.region(tag, **options):
        return torch.randint(0, 256, (mib * MIB,), dtype=torch.uint8, device=saver.device)


def cache(saver, tag, mib):
    """torch keeps as much for the tag's next tensors."""
    noise(saver, tag, mib)


def leave_room(saver, mib):
    """From now on ebbtide may hold this much more on the device."""
    saver.trim()
    saver.configure(device_limit=_core.query_device(0).held_bytes + mib * MIB)


@pytest.fixture
def away(saver, tag):
    """A paused tensor of 64 MiB, and its content."""
    tensor = noise(saver, tag, 64)
    want = tensor.cpu()
    saver.pause(tag)
    return tensor, want


def resume(saver, tag):
    saver.resume(tag)


def resume_in_background(saver, tag):
    saver.resume(tag, wait=False).wait()


def swap(saver, tag):
    with saver.region(f"{tag}-leaves"):
        leaves = torch.ones(2 * MIB, dtype=torch.uint8, device=saver.device)
    saver.swap(pause=f"{tag}-leaves", resume=tag)
    assert saver.is_paused(f"{tag}-leaves")
    del leaves


@pytest.mark.parametrize("bring_back", [resume, resume_in_background, swap])
def test_what_other_tags_cache_makes_room(saver, tag, tag2, away, bring_back):
    tensor, want = away
    leave_room(saver, 96)
    kept, gone = noise(saver, tag2, 12), noise(saver, tag2, 64)
    kept_want = kept.cpu()
    del gone
    bring_back(saver, tag)
    assert torch.equal(tensor.cpu(), want) and torch.equal(kept.cpu(), kept_want)
    assert saver.tags()[tag2].size_bytes == 12 * MIB


def test_what_came_back_behind_one_handle_with_living_memory_makes_room(saver, tag, tag2, away):
    tensor, want = away
    leave_room(saver, 80)  # the handle of both must fit once more
    kept, gone = noise(saver, tag2, 12), noise(saver, tag2, 20)
    kept_want = kept.cpu()
    saver.pause(tag2)
    saver.resume(tag2)
    del gone
    saver.resume(tag)
    assert torch.equal(tensor.cpu(), want) and torch.equal(kept.cpu(), kept_want)
    saver.pause(tag2)
    saver.resume(tag2)
    assert torch.equal(kept.cpu(), kept_want)


def test_paused_brings_its_tag_back_by_what_was_cached_meanwhile(saver, tag, tag2):
    tensor = noise(saver, tag, 64)
    want = tensor.cpu()
    leave_room(saver, 8)
    with saver.paused(tag):
        cache(saver, tag2, 64)
    assert torch.equal(tensor.cpu(), want)


def test_the_memory_of_a_trimmed_pool_comes_back_by_what_others_cache(saver, tag, tag2):
    cache(saver, tag, 64)
    saver.trim(tag)
    leave_room(saver, 72)
    cache(saver, tag2, 64)
    again = noise(saver, tag, 64)
    assert again.nbytes == saver.tags()[tag].resident_bytes


def test_what_is_in_use_stays_and_the_resume_is_refused(saver, tag, tag2, away):
    leave_room(saver, 72)
    kept = noise(saver, tag2, 64)
    with pytest.raises(OutOfMemoryError):
        saver.resume(tag)
    assert saver.is_paused(tag) and saver.tags()[tag2].resident_bytes == kept.nbytes


def test_what_has_room_frees_nothing(saver, tag, tag2, away):
    cache(saver, tag2, 64)
    saver.resume(tag)
    assert saver.tags()[tag2].resident_bytes == 64 * MIB


def test_what_is_cached_while_a_resume_waits_makes_room(saver, tag, tag2, away):
    tensor, want = away
    leave_room(saver, 72)
    held = [noise(saver, tag2, 64)]
    timer = threading.Timer(0.1, held.clear)
    timer.start()
    saver.resume(tag, timeout=30)
    timer.join()
    assert torch.equal(tensor.cpu(), want)


def test_what_torch_calls_free_is_left_alone_where_the_caller_does_not_rely_on_it(saver, tag, tag2, away):
    leave_room(saver, 72)
    cache(saver, tag2, 64)
    saver.configure(skip_unused=False)
    try:
        with pytest.raises(OutOfMemoryError):
            saver.resume(tag)
    finally:
        saver.configure(skip_unused=True)
    assert saver.tags()[tag2].resident_bytes == 64 * MIB


def test_while_another_thread_is_in_a_region_the_other_tags_give(saver, tag, tag2, away):
    tensor, want = away
    leave_room(saver, 96)
    entered, may_leave = threading.Event(), threading.Event()

    def stay():
        with saver.region(f"{tag}-busy"):
            entered.set()
            may_leave.wait(30)

    thread = threading.Thread(target=stay)
    thread.start()
    entered.wait(30)
    try:
        cache(saver, tag2, 64)
        saver.resume(tag)
        assert torch.equal(tensor.cpu(), want)
    finally:
        may_leave.set()
        thread.join()


def test_during_a_capture_nothing_is_freed(saver, tag, tag2, monkeypatch):
    cache(saver, tag2, 64)
    monkeypatch.setattr(captures, "is_capturing", lambda: True)
    assert not torch_cache.give_back()
    assert saver.tags()[tag2].resident_bytes == 64 * MIB


def lines_of(caplog):
    found = [record.getMessage() for record in caplog.records if record.name == "ebbtide"]
    caplog.clear()
    return found


def test_where_torch_is_out_of_memory_a_line_says_what_tags_cache(saver, tag, tag2, caplog):
    saver.trim()
    kept = noise(saver, tag2, 12)
    advice.advise(0, 64 * MIB, 4096 * MIB, 8 * MIB)
    assert lines_of(caplog) == []
    cache(saver, tag, 64)
    cache(saver, tag2, 32)
    advice.advise(1, 64 * MIB, 4096 * MIB, 8 * MIB)  # the cached memory is on another device
    assert lines_of(caplog) == []
    for _ in range(2):  # once, as long as nothing changes
        advice.advise(0, 64 * MIB, 4096 * MIB, 8 * MIB)
    assert lines_of(caplog) == [
        "torch found no room for 64.0 MiB on device 0 (8.0 MiB free), while the pools of 2 tags cache 96.0 MiB that "
        f"no tensor uses: saver.trim({tag!r}, {tag2!r}) gives it back"
    ]
    assert saver.trim(tag, tag2).bytes == 96 * MIB
    advice.advise(0, 64 * MIB, 4096 * MIB, 8 * MIB)
    assert lines_of(caplog) == []
    assert kept.nbytes == saver.tags()[tag2].resident_bytes


def test_what_a_region_may_still_use_is_not_advised(saver, tag, caplog):
    saver.trim()
    cache(saver, tag, 64)
    with saver.region(tag):
        assert advice.cached_bytes(0) == {}
    assert advice.cached_bytes(0) == {tag: 64 * MIB}


def test_advice_never_takes_the_place_of_torchs_error(saver, tag, caplog, monkeypatch):
    saver.trim()
    cache(saver, tag, 64)
    for name in ("segments", "segments_of"):
        monkeypatch.setattr(type(backends.existing_backend()), name, lambda *_: 1 / 0)
    advice.advise(0, MIB, MIB, 0)
    monkeypatch.setattr(advice, "cached_bytes", lambda _: 1 / 0)
    advice.advise(0, MIB, MIB, 0)
    assert lines_of(caplog) == []
