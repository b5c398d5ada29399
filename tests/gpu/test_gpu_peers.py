"""Two GPUs that access each other's memory: tensors of regions as source and as destination of copies between them."""

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.expected_skip("one GPU only")

TWO = """
first, second = torch.device("cuda:0"), torch.device("cuda:1")
torch.manual_seed(0)

def noise(*shape, device, dtype=torch.float32):
    return torch.randn(*shape, device="cpu").to(dtype).to(device)

def check_copies(inside, outside):
    # inside: of a region on one device; outside: on the other one. All ways to copy, in both directions.
    for to, source in ((inside, outside), (outside, inside)):
        wanted = torch.randn(source.shape).to(source.dtype)
        source.copy_(wanted.to(source.device))
        to.zero_()
        to.copy_(source)  # contiguous
        assert torch.equal(to.cpu(), wanted)
        to.zero_()
        to[:, ::2].copy_(source[:, 1::2])  # strided
        assert torch.equal(to[:, ::2].cpu(), wanted[:, 1::2]) and not to[:, 1::2].any()
        to.zero_()
        to.t().copy_(source.t())  # transposed: strided on both sides
        assert torch.equal(to.cpu(), wanted)
        to.zero_()
        to.copy_(source.to(torch.float64))  # another dtype
        assert torch.equal(to.cpu(), wanted)
        to.zero_()
        to.copy_(source, non_blocking=True)
        torch.cuda.synchronize(source.device); torch.cuda.synchronize(to.device)
        assert torch.equal(to.cpu(), wanted)
"""

SHAPE = "(1024, 4096)"


@pytest.fixture(autouse=True)
def _two_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU only")


def test_copies_between_devices_before_and_after_a_pause(program: Callable[..., str]) -> None:
    program(f"""{TWO}
torch.zeros(1, device=second)
with saver.region("w"):
    inside = torch.empty({SHAPE}, device=first)
outside = torch.empty({SHAPE}, device=second)
check_copies(inside, outside)
kept = inside.cpu()
saver.pause("w"); saver.resume("w")
assert torch.equal(inside.cpu(), kept)
check_copies(inside, outside)
kept = inside.cpu()
saver.pause("w")
pending = saver.resume("w", wait=False)
pending.wait()
assert torch.equal(inside.cpu(), kept)
check_copies(inside, outside)
""")


def test_a_region_on_the_other_device(program: Callable[..., str]) -> None:
    program(f"""{TWO}
torch.zeros(1, device=first)
with saver.region("w"):
    inside = torch.empty({SHAPE}, device=second)
outside = torch.empty({SHAPE}, device=first)
check_copies(inside, outside)
saver.pause("w"); saver.resume("w")
check_copies(inside, outside)
""")


def test_a_device_that_is_touched_after_the_region_was_entered(program: Callable[..., str]) -> None:
    """Memory that was mapped before gets the access when a region is entered next."""
    program(f"""{TWO}
with saver.region("w"):
    inside = noise(*{SHAPE}, device=first)
kept = inside.cpu()
outside = torch.empty({SHAPE}, device=second)
with saver.region("w"):
    pass
assert torch.equal(inside.cpu(), kept)
check_copies(inside, outside)
saver.pause("w"); saver.resume("w")
check_copies(inside, outside)
""")


def test_both_tensors_are_of_regions(program: Callable[..., str]) -> None:
    program(f"""{TWO}
torch.zeros(1, device=first); torch.zeros(1, device=second)
with saver.region("a"):
    one = torch.empty({SHAPE}, device=first)
with saver.region("b"):
    two = torch.empty({SHAPE}, device=second)
check_copies(one, two)
saver.swap(pause="a", resume="b"); saver.swap(pause="b", resume="a"); saver.resume("b")
check_copies(one, two)
""")


def test_what_spilled_is_reached_by_the_other_device(program: Callable[..., str]) -> None:
    """The start of the memory is on the device and the rest on the host. After the promotion, all of it is on the
    device, and after the demotion on the host."""
    program(f"""{TWO}
torch.zeros(1, device=second)
torch.zeros(1, device=first)
held = ebbtide._core.query_device(0).held_bytes
saver.configure(device_limit=held + 8 * MIB)
with saver.region("acts", overflow="split"):
    inside = torch.empty({SHAPE}, device=first)
assert saver.tags()["acts"].host_bytes > 0
outside = torch.empty({SHAPE}, device=second)
check_copies(inside, outside)
saver.configure(device_limit=None)
saver.promote("acts")
assert saver.tags()["acts"].host_bytes == 0
check_copies(inside, outside)
saver.demote("acts")
assert saver.tags()["acts"].host_bytes == saver.tags()["acts"].resident_bytes
check_copies(inside, outside)
""")


def test_two_tags_on_two_devices_move_in_one_call(program: Callable[..., str]) -> None:
    program("""
first, second = torch.device("cuda:0"), torch.device("cuda:1")
tensors = {}
for tag, device in (("a", first), ("b", second)):
    with saver.region(tag):
        tensors[tag] = [torch.randint(0, 256, (n * MIB,), dtype=torch.uint8, device=device) for n in (1, 64, 500)]
kept = {tag: [t.cpu() for t in group] for tag, group in tensors.items()}
addresses = [t.data_ptr() for group in tensors.values() for t in group]
for wait in (True, False, True):
    report = saver.pause("a", "b")
    assert set(report.by_device) == {0, 1} and min(report.by_device.values()) >= 565 * MIB
    pending = saver.resume("a", "b", wait=wait)
    if not wait:
        pending.wait()
    assert [t.data_ptr() for group in tensors.values() for t in group] == addresses
    for tag, group in tensors.items():
        assert all(torch.equal(t.cpu(), k) for t, k in zip(group, kept[tag]))
tensors["a"][2].copy_(tensors["b"][2])
assert torch.equal(tensors["a"][2].cpu(), kept["b"][2])
""")
