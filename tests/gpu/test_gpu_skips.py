"""Blocks that a pause skips, as found by the GPU's kernels and in torch's own record of its pools."""

import pytest

torch = pytest.importorskip("torch")

MIB = 1 << 20
BLOCK = 2 * MIB


@pytest.fixture
def switches(saver):
    yield saver
    saver.configure(skip_clean=True, skip_unused=True, skip_constant=True)


def noise(saver, tag, mib, **options):
    with saver.region(tag, **options):
        return torch.randint(0, 256, (mib * MIB,), dtype=torch.uint8, device="cuda")


def cycle(saver, *tags):
    report = saver.pause(*tags)
    saver.resume(*tags)
    return report


def bits(tensor):
    return tensor.cpu().view(torch.uint8)


# --- unused ---


def test_dead_tensors_are_not_copied_and_living_ones_are_bit_exact(switches, tag):
    saver = switches
    with saver.region(tag):
        tensors = [
            torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda")
            for size in (1000, 300_000, MIB, 3 * MIB, 9 * MIB + 512, 12 * MIB, 40 * MIB, 70 * MIB + 8, 5 * MIB, 33)
        ]
    torch.cuda.synchronize()
    for index in (7, 5, 3, 1):
        del tensors[index]
    want = [bits(tensor) for tensor in tensors]
    for _ in range(2):
        report = cycle(saver, tag)
        assert report.unused >= (70 + 12) * MIB
        assert report.copied + report.skipped == report.bytes
        assert all(torch.equal(bits(tensor), other) for tensor, other in zip(tensors, want, strict=True))
    saver.configure(skip_unused=False)
    assert cycle(saver, tag).unused == 0
    assert all(torch.equal(bits(tensor), other) for tensor, other in zip(tensors, want, strict=True))


def test_a_graphs_intermediate_memory_is_never_unused(switches, tag):
    saver = switches
    x = torch.randn(8 * MIB, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with saver.cuda_graph(graph, tag=tag):
        state = torch.zeros(8 * MIB, device="cuda")  # torch calls its block free once the name is gone
        running = state + x
        del state
        result = running * 2
        del running
    graph.replay()
    torch.cuda.synchronize()
    want = bits(result)
    assert torch.equal(want, bits(x * 2))
    for _ in range(2):
        report = cycle(saver, tag)
        assert report.unused == 0 and report.bytes >= 64 * MIB
        assert torch.equal(bits(result), want)
        result.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(bits(result), want)


def test_what_a_stream_still_uses_is_not_unused(switches, tag):
    """torch holds such a block back (active_pending_free) until it next checks its events."""
    saver = switches
    side = torch.cuda.Stream()
    used = noise(saver, tag, 64)
    want = used.to(torch.int64).sum().item()
    used.record_stream(side)
    with torch.cuda.stream(side):
        torch.cuda._sleep(500_000_000)
        total = used.sum()
    del used
    report = saver.pause(tag)
    assert report.unused == 0 and report.bytes == 64 * MIB
    saver.resume(tag)
    assert total.item() == want  # the pause waited for the queued work
    torch.empty(MIB, dtype=torch.uint8, device="cuda")  # torch checks its events here, but not while a pool is open
    assert cycle(saver, tag).unused >= 64 * MIB


# --- clean ---


@pytest.mark.parametrize("backup", ["ram", "pinned", "disk"])
def test_an_unchanged_pause_copies_nothing_and_a_tenth_a_tenth(switches, tag, backup):
    saver = switches
    tensors = [noise(saver, tag, 16, backup=backup, retain=True) for _ in range(20)]
    size = 320 * MIB
    first = cycle(saver, tag)
    assert (first.copied, first.clean) == (size, 0)
    again = cycle(saver, tag)
    assert (again.copied, again.clean, again.bytes) == (0, size, size)
    for tensor in tensors[::10]:
        tensor.random_(0, 256)
    want = [bits(tensor) for tensor in tensors]
    tenth = cycle(saver, tag)
    assert (tenth.copied, tenth.clean) == (size // 10, size * 9 // 10)
    assert all(torch.equal(bits(tensor), other) for tensor, other in zip(tensors, want, strict=True))


def test_clean_switched_off(switches, tag):
    saver = switches
    data = noise(saver, tag, 64, retain=True)
    want = bits(data)
    cycle(saver, tag)
    saver.configure(skip_clean=False)
    report = cycle(saver, tag)
    assert (report.clean, report.copied) == (0, 64 * MIB)
    assert torch.equal(bits(data), want)
    saver.configure(skip_clean=True)
    cycle(saver, tag)  # makes the digests that were skipped
    assert cycle(saver, tag).clean == 64 * MIB
    assert torch.equal(bits(data), want)


# --- constant ---


@pytest.mark.parametrize("is_on", [True, False])
def test_constant_blocks_come_back(switches, tag, is_on):
    saver = switches
    saver.configure(skip_constant=is_on)
    with saver.region(tag):
        tensors = [
            torch.zeros(16 * MIB, device="cuda"),
            torch.full((16 * MIB,), -0.0, device="cuda"),
            torch.full((32 * MIB,), float("nan"), dtype=torch.bfloat16, device="cuda"),
            torch.full((8 * MIB,), 0x0123456789ABCDEF, dtype=torch.int64, device="cuda"),
            torch.full((8 * MIB,), complex(1.5, -2.5), dtype=torch.complex64, device="cuda"),
        ]
    want = [bits(tensor) for tensor in tensors]
    report = cycle(saver, tag)
    assert (report.constant, report.copied) == ((320 * MIB, 0) if is_on else (0, 320 * MIB))
    assert all(torch.equal(bits(tensor), other) for tensor, other in zip(tensors, want, strict=True))


# --- content that could be mistaken ---


def all_but_the_last_byte(data):
    data.fill_(0xA5)
    data[BLOCK - 1 :: BLOCK] ^= 1


def all_but_the_first_byte(data):
    data.zero_()
    data[::BLOCK] = 1


def nans_with_payloads(data):
    data.view(torch.int32).random_().bitwise_or_(0x7F800001)


def signs_of_zero(data):
    data.zero_()
    data.view(torch.int32)[1::7] = -(2**31)


def sixteen_bytes_again_and_again(data):
    data.view(torch.int64)[::2] = 1
    data.view(torch.int64)[1::2] = 2


def thirty_two_bytes_again_and_again(data):  # not one value of 16 bytes
    data.view(torch.int64).copy_(torch.arange(data.numel() // 8, device="cuda") % 4)


def blocks_that_change_places(data):
    data.random_(0, 256)
    data.view(-1, BLOCK)[1::2] = data.view(-1, BLOCK)[::2]


CONTENTS = [
    all_but_the_last_byte, all_but_the_first_byte, nans_with_payloads, signs_of_zero, sixteen_bytes_again_and_again,
    thirty_two_bytes_again_and_again, blocks_that_change_places,
]  # fmt: skip


def flip(data, position):
    data[position : position + 1] ^= 0x80


@pytest.mark.parametrize("make", CONTENTS, ids=lambda make: make.__name__)
def test_adversarial_content_is_bit_exact_over_retained_cycles(switches, tag, make):
    saver = switches
    data = noise(saver, tag, 32, retain=True)
    make(data)
    for positions in ((), (), (BLOCK - 1,), (BLOCK, 32 * MIB - 1), (0, BLOCK - 16, BLOCK + 15)):
        for position in positions:
            flip(data, position)
        want = bits(data)
        report = cycle(saver, tag)
        assert torch.equal(bits(data), want)
        assert report.copied + report.skipped == 32 * MIB
    assert cycle(saver, tag).copied == 0
    # Two equal blocks change places, and one block gets the content of the other.
    blocks = data.view(-1, BLOCK)
    blocks[[0, 5]] = blocks[[5, 0]]
    blocks[3] = blocks[7]
    want = bits(data)
    cycle(saver, tag)
    assert torch.equal(bits(data), want)
    assert cycle(saver, tag).copied == 0
    assert torch.equal(bits(data), want)


def test_one_bit_anywhere_is_seen(switches, tag):
    """Every bit of a byte, every byte of a lane's 16, and both ends of the range that each thread of the kernel
    reads."""
    saver = switches
    data = noise(saver, tag, 64, retain=True)
    cycle(saver, tag)
    offsets = [*range(16), 16 * 511, 16 * 512 - 1, 16 * 512, BLOCK // 2 - 1, BLOCK // 2, BLOCK - 16, BLOCK - 1]
    blocks = data.view(-1, BLOCK)
    for index, offset in enumerate(offsets):
        blocks[index, offset] ^= 1 << (index % 8)
    want = bits(data)
    report = cycle(saver, tag)
    assert (report.copied, report.clean) == (len(offsets) * BLOCK, 64 * MIB - len(offsets) * BLOCK)
    assert torch.equal(bits(data), want)
