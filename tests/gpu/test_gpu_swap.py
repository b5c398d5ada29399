"""Two tags that fit on the device only one at a time."""

import pytest

torch = pytest.importorskip("torch")

from ebbtide import _core  # noqa: E402
from ebbtide.errors import OutOfMemoryError  # noqa: E402

pytestmark = pytest.mark.device_memory

MIB = 1 << 20
MARGIN = 256 * MIB


def noise(saver, tag, *sizes_mib, **options):
    with saver.region(tag, **options):
        return [torch.randint(0, 256, (mib * MIB,), dtype=torch.uint8, device="cuda") for mib in sizes_mib]


def copies(tensors):
    return [tensor.cpu() for tensor in tensors]


def assert_same(tensors, want):
    assert all(torch.equal(tensor.cpu(), other) for tensor, other in zip(tensors, want, strict=True))


@pytest.mark.parametrize("options", [{}, {"retain": True}, {"backup": "pinned"}], ids=str)
def test_two_tags_that_fit_one_at_a_time(saver, tag, options):
    second_tag = f"{tag}-second"
    first = noise(saver, tag, 512, 20, 3, **options)
    want = copies(first)
    elsewhere = _core.query_device(0).held_bytes - saver.tags()[tag].size_bytes
    saver.pause(tag)
    second = noise(saver, second_tag, 256, 256, 100, **options)
    want_second = copies(second)
    sizes = saver.tags()[tag].size_bytes, saver.tags()[second_tag].size_bytes
    saver.configure(device_limit=elsewhere + max(sizes) + MARGIN)
    with pytest.raises(OutOfMemoryError):
        saver.resume(tag)
    for _ in range(3):
        done = saver.swap(pause=second_tag, resume=tag)
        assert (done.paused.bytes, done.resumed.bytes) == (sizes[1], sizes[0])
        assert_same(first, want)
        first[0][-1] ^= 1
        want[0][-1] ^= 1
        done = saver.swap(pause=tag, resume=second_tag)
        assert (done.paused.bytes, done.resumed.bytes) == sizes
        assert_same(second, want_second)
    saver.configure(device_limit=None)
    saver.resume(tag)
    assert_same(first + second, want + want_second)


def test_device_memory_stays_within_the_larger_side_and_the_margin(saver, tag):
    """Another thread samples the device's free memory, and the bytes that ebbtide reports."""
    import threading

    first, second = noise(saver, tag, 700, 300), noise(saver, f"{tag}-second", 1100)
    want, want_second = copies(first), copies(second)
    larger = saver.tags()[f"{tag}-second"].size_bytes
    elsewhere = _core.query_device(0).held_bytes - saver.tags()[tag].size_bytes - larger
    saver.pause(f"{tag}-second")
    saver.swap(pause=tag, resume=f"{tag}-second")  # makes the second ring
    torch.cuda.empty_cache()
    samples, is_over = [], threading.Event()

    def sample():
        while not is_over.is_set():
            info = _core.query_device(0)
            samples.append((info.held_bytes, info.free_bytes))

    at_rest = _core.query_device(0).free_bytes  # with the larger one resident
    thread = threading.Thread(target=sample)
    thread.start()
    try:
        for _ in range(2):
            saver.swap(pause=f"{tag}-second", resume=tag)
            saver.swap(pause=tag, resume=f"{tag}-second")
    finally:
        is_over.set()
        thread.join()
    assert max(held for held, _ in samples) <= elsewhere + larger + MARGIN
    assert at_rest - min(free for _, free in samples) <= MARGIN + 64 * MIB  # page tables and the like
    saver.resume(tag)
    assert_same(first + second, want + want_second)


def test_too_little_room_leaves_both_as_they_were(saver, tag):
    second_tag = f"{tag}-second"
    first, second = noise(saver, tag, 64, 12), noise(saver, second_tag, 600, 12)
    want, want_second = copies(first), copies(second)
    saver.pause(second_tag)
    held, free = _core.query_device(0).held_bytes, torch.cuda.mem_get_info()[0]
    saver.configure(device_limit=held + 128 * MIB)
    with pytest.raises(OutOfMemoryError) as error:
        saver.swap(pause=tag, resume=second_tag)
    assert isinstance(error.value, torch.OutOfMemoryError)
    saver.configure(device_limit=None)
    assert (saver.tags()[tag].state, saver.tags()[second_tag].state) == ("resident", "paused")
    assert _core.query_device(0).held_bytes == held
    assert torch.cuda.mem_get_info()[0] >= free - 64 * MIB
    assert_same(first, want)
    saver.swap(pause=tag, resume=second_tag)
    assert_same(second, want_second)
    saver.resume(tag)
    assert_same(first, want)


def test_invariant_2_memory_that_changes_hands_is_cleared(saver, tag):
    secret, bare = noise(saver, tag, 128, 64), noise(saver, f"{tag}-bare", 128, 64, backup=None)
    want = copies(secret)
    saver.pause(f"{tag}-bare")
    for _ in range(2):
        saver.swap(pause=tag, resume=f"{tag}-bare")
        assert not any(tensor.any() for tensor in bare)
        for tensor in bare:
            tensor.fill_(7)
        saver.swap(pause=f"{tag}-bare", resume=tag)
        assert_same(secret, want)
