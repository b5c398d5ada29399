"""Memory that torch caches and nothing uses goes back before a resume, a swap or a region is refused for lack of it."""

import threading
import time

import pytest

torch = pytest.importorskip("torch")

from ebbtide import _core  # noqa: E402
from ebbtide.errors import OutOfMemoryError  # noqa: E402
from ebbtide.saver.pools import backends, captures  # noqa: E402
from ebbtide.saver.reclaim import advice, torch_cache  # noqa: E402
from random_memory import random_bytes  # noqa: E402

MIB = 1 << 20

pytestmark = pytest.mark.device_memory


def noise(saver, tag, mib, **options):
    with saver.region(tag, **options):
        return random_bytes(mib * MIB, saver.device)


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
    begin = time.monotonic()
    saver.resume(tag, timeout=60)
    assert time.monotonic() - begin < 30  # not only before the last try
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


@pytest.fixture
def explained(monkeypatch):
    """As on a GPU: on the simulated device, an allocation that finds no room trims all pools by itself."""
    monkeypatch.setattr(torch.OutOfMemoryError, "__str__", torch.OutOfMemoryError.__str__)
    advice.install()


def test_torchs_out_of_memory_says_what_tags_cache(saver, tag, tag2, explained):
    saver.trim()
    kept = noise(saver, tag2, 12)
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 MiB.")
    assert str(error) == error.args[0]
    cache(saver, tag, 64)
    cache(saver, tag2, 32)
    assert str(error) == (
        "CUDA out of memory. Tried to allocate 64.00 MiB. ebbtide: the pools of 2 tags cache 96.0 MiB that no tensor "
        f"uses: saver.trim({tag!r}, {tag2!r}) gives it back."
    )
    assert error.args == ("CUDA out of memory. Tried to allocate 64.00 MiB.",) and "ebbtide" not in repr(error)
    assert saver.trim(tag, tag2).bytes == 96 * MIB
    assert str(error) == error.args[0]
    assert kept.nbytes == saver.tags()[tag2].resident_bytes


def test_of_many_tags_none_is_named(saver, tag, explained):
    saver.trim()
    for number in range(4):
        cache(saver, f"{tag}-{number}", 2)
    assert str(torch.OutOfMemoryError()).endswith(
        "4 tags cache 80.0 MiB that no tensor uses: saver.trim() gives it back."
    )


def test_ebbtides_own_error_stays_as_it_is(saver, tag, tag2, away, explained):
    leave_room(saver, 32)
    cache(saver, tag2, 20)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        saver.resume(tag)
    cache(saver, tag2, 20)
    assert isinstance(caught.value, OutOfMemoryError) and "no tensor uses" not in str(caught.value)


def test_what_a_region_may_still_use_is_not_advised(saver, tag):
    saver.trim()
    cache(saver, tag, 64)
    with saver.region(tag):
        assert advice.cached_bytes() == {}
    assert advice.cached_bytes() == {tag: 64 * MIB}


def test_where_nothing_is_known_torchs_text_stands(saver, tag, monkeypatch, explained):
    saver.trim()
    cache(saver, tag, 64)
    monkeypatch.setattr(type(backends.existing_backend()), "segments_of", lambda *_: 1 / 0)
    assert str(torch.OutOfMemoryError("text")) == "text"
    monkeypatch.setattr(advice, "cached_bytes", lambda: 1 / 0)
    assert str(torch.OutOfMemoryError("text")) == "text"
