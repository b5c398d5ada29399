"""CPU tensors in pools of the simulated device, through `_torch` itself: which memory they get, and its later life."""

import gc
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ebbtide
import pytest
import torch
from ebbtide import _core, torch_extension

pytestmark = pytest.mark.sim_only

MIB = 1 << 20


@pytest.fixture(scope="module")
def extension():
    _core.use_driver("sim")
    module = torch_extension.load()
    module.install()
    module.install()
    assert torch_extension.load() is module
    return module


class Pools:
    def __init__(self, extension):
        self.extension = extension
        self.count = 0

    def make(self, tag: str) -> int:
        return self.extension.pool_create(_core.bind_slot(tag, 0, 1), tag)

    @contextmanager
    def inside(self, pool: int) -> Iterator[None]:
        self.extension.pool_enter(pool)
        try:
            yield
        finally:
            self.extension.pool_leave(pool)

    def holds(self, pool: int, tensor: torch.Tensor) -> bool:
        address = tensor.untyped_storage().data_ptr()
        return any(
            start + offset == address and is_allocated
            for start, _, blocks in self.extension.pool_snapshot(pool)
            for offset, _, is_allocated in blocks
        )

    def allocated_bytes(self, pool: int) -> int:
        return sum(
            size
            for _, _, blocks in self.extension.pool_snapshot(pool)
            for _, size, is_allocated in blocks
            if is_allocated
        )


@pytest.fixture
def pools(extension):
    return Pools(extension)


@pytest.fixture
def pool(pools, request):
    return pools.make(request.node.name)


def test_only_tensors_made_inside_lie_in_the_pool(pools, pool):
    before = torch.ones(1000)
    with pools.inside(pool):
        inside = torch.ones(1000)
        made = [torch.randn(7, 3), torch.nn.Linear(64, 64).weight, inside + 1, torch.tensor([1, 2, 3]), before.clone()]
    after = torch.ones(1000)
    assert pools.holds(pool, inside) and all(pools.holds(pool, tensor) for tensor in made)
    assert not pools.holds(pool, before) and not pools.holds(pool, after)
    assert _core.find(inside.data_ptr()).tag == "test_only_tensors_made_inside_lie_in_the_pool"
    assert _core.find(before.data_ptr()) is None
    assert torch.equal(inside, before)


def test_blocks_are_cut_as_on_a_gpu(pools, pool):
    with pools.inside(pool):
        kept = [torch.empty(size, dtype=torch.uint8) for size in (1, MIB, 5 * MIB, 16 * MIB, 33 * MIB + 1)]
    assert sorted(size // MIB for _, size, _ in pools.extension.pool_snapshot(pool)) == [2, 16, 20, 34]
    assert all(tensor.data_ptr() % 512 == 0 for tensor in kept)
    for address, size, blocks in pools.extension.pool_snapshot(pool):
        assert [offset for offset, _, _ in blocks] == [
            sum(before for _, before, _ in blocks[:index]) for index in range(len(blocks))
        ]
        assert sum(length for _, length, _ in blocks) == size
        assert _core.find(address).size_bytes == size


def test_the_innermost_pool_wins_and_suspending_gives_ordinary_memory(pools, pool):
    inner = pools.make("inner")
    with pools.inside(pool):
        with pools.inside(inner):
            first = torch.ones(10)
        second = torch.ones(10)
        token = pools.extension.pool_suspend()
        ordinary = torch.ones(10)
        with pools.inside(inner):
            third = torch.ones(10)
        pools.extension.pool_restore(token)
        fourth = torch.ones(10)
    assert [pools.holds(inner, tensor) for tensor in (first, second, third)] == [True, False, True]
    assert [pools.holds(pool, tensor) for tensor in (second, ordinary, fourth)] == [True, False, True]


def test_other_threads_are_left_alone_unless_all_are_taken(pools, pool):
    for_all, own = pools.make("for_all"), pools.make("own")
    made = {}

    def work(name: str) -> None:
        made[name] = torch.ones(10)
        with pools.inside(own):
            made[f"{name}, own"] = torch.ones(10)

    def run(name: str) -> None:
        thread = threading.Thread(target=work, args=(name,))
        thread.start()
        thread.join()

    with pools.inside(pool):
        run("one")
        pools.extension.pool_enter(for_all, True)
        run("all")
        made["mine"] = torch.ones(10)
        pools.extension.pool_leave(for_all, True)
    run("after")
    assert {name for name, tensor in made.items() if pools.holds(for_all, tensor)} == {"all"}
    assert {name for name, tensor in made.items() if pools.holds(own, tensor)} == {"one, own", "all, own", "after, own"}
    assert pools.holds(pool, made["mine"])


def test_backward_in_a_region_leaves_gradients_there(pools, pool):
    layer = torch.nn.Linear(32, 32)
    with pools.inside(pool):
        layer(torch.ones(4, 32)).sum().backward()
    assert pools.holds(pool, layer.weight.grad) and not pools.holds(pool, layer.weight)


def test_a_pool_is_open_once_and_left_where_it_was_entered(pools, pool):
    from ebbtide.errors import StateError

    with pools.inside(pool):
        with pytest.raises(StateError, match="open already"):
            pools.extension.pool_enter(pool)
        with pytest.raises(StateError, match="open already"):
            pools.extension.pool_enter(pool, True)
        with pytest.raises(StateError, match="not entered for all"):
            pools.extension.pool_leave(pool, True)
    with pytest.raises(StateError, match="not entered"):
        pools.extension.pool_leave(pool)
    with pytest.raises(StateError):
        pools.extension.pool_restore(12345678)
    for call in (
        pools.extension.pool_enter,
        pools.extension.pool_leave,
        pools.extension.pool_snapshot,
        pools.extension.pool_trim,
    ):
        with pytest.raises(ValueError, match="no pool"):
            call(999_999)
    header = (Path(ebbtide.__file__).with_name("include") / "ebbtide.h").read_text()
    for slot in (-1, int(re.search(r"EBBTIDE_SLOT_COUNT (\d+)", header)[1])):
        with pytest.raises(ValueError, match="slot"):
            pools.extension.pool_create(slot)


def test_empty_tensors_take_nothing(pools, pool):
    with pools.inside(pool):
        tensors = [torch.empty(0), torch.empty(3, 0, 2), torch.ones(0).clone()]
    assert pools.extension.pool_snapshot(pool) == []
    assert all(tensor.numel() == 0 for tensor in tensors)


def test_freed_blocks_wait_for_the_pool_to_be_open_again(pools, pool):
    with pools.inside(pool):
        tensor = torch.ones(MIB)
    address = tensor.data_ptr()
    del tensor
    assert pools.allocated_bytes(pool) == 0
    assert torch.ones(MIB).data_ptr() != address
    with pools.inside(pool):
        assert torch.ones(MIB).data_ptr() == address


def test_storages_grow_where_they_are_told(pools, pool):
    outside = torch.ones(4)
    with pools.inside(pool):
        inside = torch.ones(4)
        outside.resize_(1000)
        inside.resize_(1000)
    assert pools.holds(pool, outside) and pools.holds(pool, inside)
    assert inside[:4].tolist() == outside[:4].tolist() == [1.0] * 4
    inside.resize_(100_000)
    assert not pools.holds(pool, inside)
    assert inside[:4].tolist() == [1.0] * 4
    outside.untyped_storage().resize_(0)
    assert pools.allocated_bytes(pool) == 0


def test_sharing_a_tensor_between_processes_takes_it_out(pools, pool):
    with pools.inside(pool):
        tensor = torch.arange(1000.0)
    tensor.share_memory_()
    assert pools.allocated_bytes(pool) == 0 and _core.find(tensor.data_ptr()) is None
    assert torch.equal(tensor, torch.arange(1000.0))


def test_invariant6_tensors_die_anywhere(pools, pool):
    made = []
    with pools.inside(pool):
        made.append(torch.ones(100))
        made.append(torch.ones(3 * MIB))
        cycle = [torch.ones(100)]
        cycle.append(cycle)
    view = made[0][10:20]
    thread = threading.Thread(target=made.clear)
    thread.start()
    thread.join()
    del cycle
    gc.collect()
    assert pools.allocated_bytes(pool) == 512, "the view keeps its storage"
    assert view.sum() == 10
    del view
    assert pools.allocated_bytes(pool) == 0


def test_frees_of_paused_memory_touch_none_of_it(pools, pool, request):
    tag = request.node.name
    with pools.inside(pool):
        first, second, large = torch.ones(100), torch.arange(100.0), torch.ones(6 * MIB)
    _core.pause([tag])
    assert _core.is_away(first.data_ptr(), first.nbytes)
    del first, large
    assert pools.allocated_bytes(pool) == 512
    _core.resume([tag])
    assert torch.equal(second, torch.arange(100.0))


def test_out_of_memory_is_torchs_error_and_passes(pools, pool, request):
    capacity = _core.query_device(0).total_bytes
    with pools.inside(pool):
        small = torch.ones(10)
        with pytest.raises(torch.OutOfMemoryError, match=rf"tag '{request.node.name}' asked for .*[KMG]iB"):
            torch.empty(capacity * 2, dtype=torch.uint8)
        with pytest.raises(torch.OutOfMemoryError, match=r" asked for 3\.00 TiB; "):
            torch.empty(3 * 2**40, dtype=torch.uint8)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(2**60, dtype=torch.uint8)
        # Cached memory is released before an allocation is refused.
        most = int(capacity * 0.6)
        for extra in range(3):
            torch.empty(most + extra * 2 * MIB, dtype=torch.uint8)
    assert small.sum() == 10
    assert pools.extension.pool_trim(pool) > 0
    assert pools.extension.pool_trim(pool) == 0
    assert len(pools.extension.pool_snapshot(pool)) == 1


def test_the_profiler_sees_allocations_and_frees(pools, pool):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        with pools.inside(pool):
            tensor = torch.empty(1_000_000, dtype=torch.uint8)
        del tensor
    sizes = [event.cpu_memory_usage for event in profile.events() if event.name in ("aten::empty", "[memory]")]
    assert 1_000_000 in sizes and -1_000_000 in sizes


def test_copy_on_write_copies_land_in_the_open_pool(pools, pool):
    with pools.inside(pool):
        original = torch.arange(1000.0)
    lazy = torch._lazy_clone(original)
    lazy += 1
    assert torch.equal(original, torch.arange(1000.0)) and torch.equal(lazy, original + 1)
    with pools.inside(pool):
        lazy = torch._lazy_clone(original)
        lazy += 1
    assert pools.holds(pool, lazy)


def test_training_in_a_region_gives_the_same_numbers(pools, pool):
    def train() -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(64, 128), torch.nn.LayerNorm(128), torch.nn.GELU(), torch.nn.Linear(128, 8)
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for _ in range(20):
            loss = torch.nn.functional.cross_entropy(model(torch.randn(16, 64)), torch.randint(8, (16,)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    expected = train()
    with pools.inside(pool):
        assert train() == expected


def test_exchange_moves_memory_under_all_aliases(pools, pool):
    tensor = torch.arange(1000.0)
    view, parameter = tensor[10:20], torch.nn.Parameter(tensor.view(10, 100))
    with pools.inside(pool):
        fresh = tensor.clone()
    address = fresh.data_ptr()
    pools.extension.exchange(tensor, fresh)
    assert tensor.data_ptr() == address and view.data_ptr() == address + 40 and parameter.data_ptr() == address
    assert torch.equal(tensor, torch.arange(1000.0))
    del fresh
    pools.extension.exchange(tensor.untyped_storage(), tensor.untyped_storage())
    tensor += 1
    assert view.tolist() == [float(value + 1) for value in range(10, 20)]
    with pytest.raises(ValueError, match="bytes"):
        pools.extension.exchange(tensor, torch.ones(3))
    with pytest.raises(ValueError, match="meta"):
        pools.extension.exchange(tensor, torch.empty(1000, device="meta"))
    with pytest.raises(TypeError):
        pools.extension.exchange(tensor, 7)


def test_invariant6_many_threads_allocate_and_free(pools, pool):
    shared: list[torch.Tensor | None] = [None] * 64
    failures = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        try:
            for _ in range(300):
                index = int(torch.randint(64, (1,), generator=generator))
                value = float(index)
                tensor = torch.full((1 + index * 997,), value)
                old, shared[index] = shared[index], tensor
                if old is not None and not bool((old == value).all()):
                    failures.append(index)
        except BaseException as error:
            failures.append(error)

    pools.extension.pool_enter(pool, True)
    try:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        pools.extension.pool_leave(pool, True)
    assert failures == []
    assert all(pools.holds(pool, tensor) for tensor in shared if tensor is not None)
    shared.clear()
    assert pools.allocated_bytes(pool) == 0
