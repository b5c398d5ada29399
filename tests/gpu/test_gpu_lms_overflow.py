"""The last resort of large model support on a GPU: where nothing can leave any more, new memory lies on the host and is
read over the bus."""

import pytest

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.device_memory


def test_tensors_that_the_program_holds_exceed_the_limit(trial):
    trial("""
    torch.full((1024,), 1.0, device="cuda").add_(1).mean().item()  # loads kernels
    torch.stack([torch.ones(1, device="cuda")]).sum().item()
    with lms.enable(limit="512MiB"), HeldByDriver() as held:
        kept = [torch.full((4, 1024, 1024), float(number), device="cuda") for number in range(80)]  # 1,280 MiB
        assert [each.mean().item() for each in kept] == list(map(float, range(80)))
        for each in kept:
            each.add_(1)
        total = torch.stack([each.mean() for each in kept]).sum().item()
        assert total == sum(range(1, 81)), total
        numbers = lms.stats()
        assert 700 * MIB <= numbers["overflow_bytes"] <= 900 * MIB, numbers
        assert numbers["peak_device_bytes"] <= 512 * MIB, numbers
        del kept
        torch.cuda.empty_cache()
        assert torch.full((1024,), 7.0, device="cuda").sum().item() == 7168
    assert held.most_bytes <= 1.02 * 512 * MIB, held.most_bytes / MIB
    """)


def test_a_training_whose_single_operation_exceeds_the_limit_learns_the_same(trial):
    trial("""
    shape = {"steps": 4, "depth": 4, "width": 1024, "batch": 65536}  # 256 MiB each activation
    plain, needed = measured(**shape)
    limit = 640 * MIB
    assert needed > 3 * limit
    with lms.enable(limit=limit, min_size=SMALL):
        train(steps=1)  # loads kernels
        torch.cuda.empty_cache()
        with HeldByDriver() as held:
            assert train(**shape) == plain
        numbers = lms.stats()
        assert numbers["peak_overflow_bytes"] > 0, numbers
        assert numbers["peak_device_bytes"] <= limit, numbers
    page_tables = numbers["peak_overflow_bytes"] / 64  # which the driver makes on the device for memory on the host
    assert held.most_bytes <= 1.02 * limit + page_tables, (held.most_bytes / MIB, numbers)
    """)


def test_what_lies_on_the_host_lives_on_after_it_is_off(trial):
    trial("""
    with lms.enable(limit="64MiB"):
        kept = torch.arange(64 * MIB, device="cuda")
        assert lms.stats()["overflow_bytes"] > 0
    assert torch.equal(kept, torch.arange(64 * MIB, device="cuda"))
    assert kept.add(1)[-1].item() == 64 * MIB
    """)


def test_what_can_leave_leaves_first(trial):
    trial("""
    plain, needed = measured()
    with lms.enable(limit=int(0.6 * needed), min_size=SMALL):
        assert train() == plain
        numbers = lms.stats()
        assert numbers["peak_overflow_bytes"] == 0 and numbers["evictions"] > 0, numbers
    """)
