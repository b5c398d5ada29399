"""vLLM's allocator over ebbtide: what vLLM's own allocator tests ask for, in our words, and what holds beyond them."""

import gc
import logging
import sys

import pytest

torch = pytest.importorskip("torch")

from ebbtide import _core  # noqa: E402
from ebbtide.errors import StoreError  # noqa: E402
from ebbtide.integrations import vllm_allocator  # noqa: E402
from ebbtide.saver.values.arguments import backup_code  # noqa: E402

MIB = 1 << 20
# The weights of these tests are no parameters: see test_vllm_kept_and_lost.py.
pytestmark = pytest.mark.filterwarnings("ignore:this sleep drops the weights:RuntimeWarning")


@pytest.fixture
def prefix(tag, monkeypatch):
    """Tags that no other test uses: this allocator sees no others."""
    monkeypatch.setattr(vllm_allocator, "PREFIX", f"{tag}.")
    return f"{tag}."


@pytest.fixture
def allocator(saver, prefix):
    made = vllm_allocator.Allocator()
    yield made
    saver.resume()
    gc.collect()
    made.release_pools()


def held(allocator):
    """Bytes on the device."""
    return sum(each.handle[1] for each in allocator.pointer_to_data.values() if not each.is_asleep)


def make(saver, allocator, tag, mib, value=1):
    with allocator.use_memory_pool(tag):
        return torch.full((mib * MIB,), value, dtype=torch.uint8, device=saver.device)


def is_full_of(tensor, value):
    return bool((tensor == value).all())


# --- as vLLM's own tests have it ---


def test_a_sleep_frees_and_a_wake_up_restores_the_default_tag(saver, allocator):
    outside = torch.zeros(1024, 1024, device=saver.device)
    noise = torch.randn(1024, 1024, device=saver.device)
    with allocator.use_memory_pool():
        own = noise.clone()
        y = torch.ones(1024, 1024, device=saver.device)
        z = torch.full((1024, 1024), 2.0, device=saver.device)
    assert torch.equal(outside + y + z, torch.full_like(outside, 3.0))
    before, device_before = held(allocator), _core.query_device(0).held_bytes
    assert before >= y.nbytes + z.nbytes
    allocator.sleep()
    assert held(allocator) == 0
    assert device_before - _core.query_device(0).held_bytes == before
    allocator.wake_up()
    assert held(allocator) == before and torch.equal(own, noise)
    assert torch.equal(outside + y + z, torch.full_like(outside, 3.0))


def test_discard_takes_its_tags_alone(saver, allocator):
    weights, cache = make(saver, allocator, "weights", 12), make(saver, allocator, "kv_cache", 14)
    allocator.discard("kv_cache")
    assert held(allocator) == weights.nbytes and is_full_of(weights, 1)
    allocator.wake_up()
    assert held(allocator) == weights.nbytes + cache.nbytes
    assert is_full_of(cache, 0)
    allocator.sleep(offload_tags="weights")
    allocator.wake_up()
    assert is_full_of(weights, 1)


def test_a_wake_up_without_room_raises_and_can_be_repeated(saver, allocator):
    saver.trim()  # what other tests have cached would make room
    kept = make(saver, allocator, None, 20)
    make_room = _core.query_device(0)
    allocator.sleep()
    saver.configure(device_limit=make_room.held_bytes - 10 * MIB)
    with pytest.raises(RuntimeError, match="device_limit"):
        allocator.wake_up()
    assert held(allocator) == 0
    saver.configure(device_limit=None)
    allocator.wake_up()
    assert is_full_of(kept, 1)


@pytest.mark.parametrize("tag", ["workspace", None])
def test_a_wake_up_with_tags_defers_weights_and_cache_alone(saver, allocator, tag):
    internal, cache = make(saver, allocator, tag, 12), make(saver, allocator, "kv_cache", 14)
    allocator.sleep(offload_tags=())
    assert held(allocator) == 0
    allocator.wake_up(tags=["weights"])
    assert held(allocator) == internal.nbytes
    allocator.wake_up(tags=["kv_cache"])
    assert held(allocator) == internal.nbytes + cache.nbytes


def test_one_tag_may_be_given_without_a_list(saver, allocator):
    weights, cache = make(saver, allocator, "weights", 12), make(saver, allocator, "kv_cache", 14)
    allocator.sleep(offload_tags="weights")
    allocator.wake_up("weights")
    assert held(allocator) == weights.nbytes and is_full_of(weights, 1)
    allocator.discard("weights")
    assert held(allocator) == 0
    allocator.wake_up("kv_cache")
    assert held(allocator) == cache.nbytes


@pytest.mark.parametrize("is_freed_early", [True, False])
def test_a_tag_that_is_entered_again_gives_up_what_died(saver, allocator, is_freed_early):
    with allocator.use_memory_pool("t"):
        gone = [torch.ones(12 * MIB, dtype=torch.uint8, device=saver.device)]
        if is_freed_early:
            gone.clear()
    kept = make(saver, allocator, "t", 16)
    gone.clear()
    with allocator.use_memory_pool("t"):
        pass
    assert held(allocator) == kept.nbytes
    allocator.sleep(offload_tags="t")
    allocator.wake_up()
    assert is_full_of(kept, 1)


# --- the documentation of vLLM ---


def test_sleeping_memory_keeps_the_policy_of_its_first_sleep(saver, allocator, caplog):
    weights, cache = make(saver, allocator, "weights", 12, 7), make(saver, allocator, "kv_cache", 12, 8)
    allocator.sleep(offload_tags=("weights",))
    with caplog.at_level(logging.WARNING):
        allocator.discard(("weights",))
        allocator.sleep(offload_tags=("kv_cache",))
    assert [record.args[0] for record in caplog.records] == ["weights", "kv_cache", "weights"]
    allocator.wake_up()
    assert is_full_of(weights, 7) and is_full_of(cache, 0)


def test_a_sleep_without_room_for_the_weights_drops_nothing(saver, allocator):
    with allocator.use_memory_pool("weights"):
        weights = torch.randn(8 << 20, device=saver.device)
    cache = make(saver, allocator, "kv_cache", 12, 8)
    before = held(allocator)
    saver.configure(host_limit=saver.stats()["host_held_bytes"] + MIB)
    with pytest.raises(StoreError):
        allocator.sleep(offload_tags=("weights",))
    assert held(allocator) == before and is_full_of(cache, 8) and bool(weights.any())
    saver.configure(host_limit=None)
    allocator.sleep(offload_tags=("weights",))
    assert held(allocator) == 0


def test_a_repeated_sleep_and_wake_up_do_nothing(saver, allocator, caplog):
    weights = make(saver, allocator, "weights", 12, 7)
    for _ in range(2):
        allocator.sleep(offload_tags=("weights",))
    assert held(allocator) == 0
    for _ in range(2):
        allocator.wake_up(["weights"])
    assert is_full_of(weights, 7)
    assert caplog.records == []


def test_a_wake_up_of_nothing_leaves_other_tags_asleep(saver, allocator, tag2):
    """No names at all would mean every tag to `saver.resume`."""
    with saver.region(tag2):
        trainers = torch.ones(12 * MIB, dtype=torch.uint8, device=saver.device)
    saver.pause(tag2)
    allocator.wake_up()
    assert saver.is_paused(tag2)
    saver.resume(tag2)
    allocator.sleep(offload_tags=())
    assert not saver.is_paused(tag2) and is_full_of(trainers, 1)


def test_usage_counts_sleeping_memory(saver, allocator):
    assert allocator.get_current_usage() == 0
    weights = make(saver, allocator, "weights", 12)
    allocator.sleep(offload_tags=())
    assert allocator.get_current_usage() == weights.nbytes
    allocator.wake_up()
    del weights
    gc.collect()
    allocator.release_pools()
    assert allocator.get_current_usage() == 0


def test_every_allocation_is_shown_by_its_address(saver, allocator):
    weights, cache = make(saver, allocator, "weights", 12, 5), make(saver, allocator, "kv_cache", 14)
    allocator.sleep(offload_tags=("weights",))
    shown = allocator.pointer_to_data
    assert {address: each.tag for address, each in shown.items()} == {
        weights.data_ptr(): "weights",
        cache.data_ptr(): "kv_cache",
    }
    assert shown[weights.data_ptr()].handle == (0, weights.nbytes, weights.data_ptr(), 0)
    assert all(each.is_asleep for each in shown.values())
    assert is_full_of(shown[weights.data_ptr()].cpu_backup_tensor, 5)
    assert shown[cache.data_ptr()].cpu_backup_tensor is None
    del shown
    allocator.wake_up()
    assert all(each.cpu_backup_tensor is None for each in allocator.pointer_to_data.values())


def test_the_current_tag_is_that_of_the_innermost_pool(saver, allocator):
    assert allocator.current_tag == allocator.default_tag == "default"
    with allocator.use_memory_pool("runtime"):
        with allocator.use_memory_pool("kv_cache"):
            assert allocator.current_tag == "kv_cache"
        assert allocator.current_tag == "runtime"
    with pytest.raises(ValueError, match="planted"), allocator.use_memory_pool("runtime"):
        raise ValueError("planted")
    assert allocator.current_tag == "default"


@pytest.mark.parametrize("wrong", [["weights"], 1, ("weights", 1)])
def test_malformed_tags_are_refused(saver, allocator, wrong):
    with pytest.raises(TypeError):
        allocator.sleep(offload_tags=wrong)
    with pytest.raises(TypeError):
        allocator.discard(wrong)


def test_hooks_of_a_tag_run_around_its_sleep(saver, allocator):
    calls = []
    weights = make(saver, allocator, "weights", 12, 3)
    make(saver, allocator, "workspace", 12)
    remove = allocator.register_tag_hooks(
        "weights", lambda: calls.append(("unmap", is_full_of(weights, 3))), lambda: calls.append("map")
    )
    allocator.sleep(offload_tags=("weights",))
    assert calls == [("unmap", True)]
    allocator.wake_up(["kv_cache"])
    assert calls == [("unmap", True)]
    allocator.wake_up()
    assert calls == [("unmap", True), "map"]
    remove()
    allocator.sleep()
    allocator.wake_up()
    assert len(calls) == 2


def test_a_vllm_with_tag_hooks_has_them_called(saver, allocator, monkeypatch):
    calls = []

    class TheirModule:
        @staticmethod
        def run_before_unmap_hooks(allocations, tags=None):
            calls.append(("before", sorted(tags), sorted(each.tag for each in allocations if not each.is_asleep)))

        @staticmethod
        def run_after_map_hooks(allocations):
            calls.append(("after", sorted(each.tag for each in allocations if not each.is_asleep)))

    monkeypatch.setitem(sys.modules, "vllm.device_allocator", TheirModule)
    weights, cache = make(saver, allocator, "weights", 12), make(saver, allocator, "kv_cache", 12)
    allocator.discard("kv_cache")
    allocator.sleep(offload_tags="weights")
    allocator.wake_up(["weights"])
    assert calls == [
        ("before", ["kv_cache"], ["kv_cache", "weights"]),
        ("before", ["weights"], ["weights"]),
        ("after", ["weights"]),
    ]
    assert is_full_of(weights, 1) and cache.nbytes == 12 * MIB


# --- what dies while weights load ---


def test_a_trim_frees_what_died_in_the_open_pool(saver, allocator):
    with allocator.use_memory_pool("weights"):
        replaced = torch.ones(24 * MIB, dtype=torch.uint8, device=saver.device)
        kept = torch.full((16 * MIB,), 2, dtype=torch.uint8, device=saver.device)
        assert allocator.trim() == 0
        del replaced
        assert allocator.trim() == 24 * MIB
        assert held(allocator) == kept.nbytes
        after = torch.full((12 * MIB,), 3, dtype=torch.uint8, device=saver.device)
        assert allocator.current_tag == "weights"
    assert held(allocator) == kept.nbytes + after.nbytes
    allocator.sleep(offload_tags="weights")
    allocator.wake_up()
    assert is_full_of(kept, 2) and is_full_of(after, 3)


def test_after_a_trim_what_dies_later_is_freed_at_the_next(saver, allocator):
    """The pool of the first step takes no more allocations. So its segments can go as soon as they are free."""
    with allocator.use_memory_pool("weights"):
        first = torch.ones(24 * MIB, dtype=torch.uint8, device=saver.device)
        allocator.trim()
        second = torch.ones(12 * MIB, dtype=torch.uint8, device=saver.device)
        del first
        assert allocator.trim() == 24 * MIB
    assert held(allocator) == second.nbytes


@pytest.mark.parametrize(("trims", "most_mib"), [(True, 96), (False, 144)])
def test_a_load_that_replaces_its_weights_needs_little_more_than_one_copy(saver, allocator, trims, most_mib):
    """Without the trims, the pool keeps the tensors that each step has replaced."""
    before, most = _core.query_device(0).held_bytes, 0
    with allocator.use_memory_pool("weights"):
        weights = [torch.ones(16 * MIB, dtype=torch.uint8, device=saver.device) for _ in range(4)]
        for index in range(4):
            weights[index] = torch.ones(20 * MIB, dtype=torch.uint8, device=saver.device)
            most = max(most, _core.query_device(0).held_bytes - before)
            if trims:
                allocator.trim()
    assert most == most_mib * MIB
    assert held(allocator) == 80 * MIB


def test_a_trim_outside_of_a_pool_does_nothing(saver, allocator):
    make(saver, allocator, "weights", 12)
    assert allocator.trim() == 0


def test_a_trim_spares_a_tag_that_is_open_twice(saver, allocator):
    with allocator.use_memory_pool("t"), allocator.use_memory_pool("t"):
        dead = torch.ones(12 * MIB, dtype=torch.uint8, device=saver.device)
        del dead
        assert allocator.trim() == 0


def test_a_trim_spares_a_tag_that_is_asleep(saver, allocator):
    weights = make(saver, allocator, "weights", 12)
    allocator.sleep(offload_tags="weights")
    with allocator.use_memory_pool("weights"):
        dead = torch.ones(12 * MIB, dtype=torch.uint8, device=saver.device)
        del dead
        assert allocator.trim() == 0
    allocator.wake_up()
    assert is_full_of(weights, 1)


def test_a_pool_that_cannot_be_entered_again_after_a_trim_is_left(saver, allocator, monkeypatch):
    with pytest.raises(RuntimeError, match="planted"):
        with allocator.use_memory_pool("weights"):
            make_region = vllm_allocator._OpenPool.__enter__

            def fail(pool):
                raise RuntimeError("planted")

            monkeypatch.setattr(vllm_allocator._OpenPool, "__enter__", fail)
            try:
                allocator.trim()
            finally:
                monkeypatch.setattr(vllm_allocator._OpenPool, "__enter__", make_region)
    assert allocator.current_tag == "default"
    weights = make(saver, allocator, "weights", 12, 9)
    assert is_full_of(weights, 9)


def test_dropped_memory_can_come_back_as_a_pattern(saver, allocator):
    weights, scratch = make(saver, allocator, "weights", 12, 7), make(saver, allocator, "workspace", 12, 8)
    addresses = weights.data_ptr(), scratch.data_ptr()
    saver.configure(poison=True)
    try:
        allocator.sleep(offload_tags="weights")
        allocator.wake_up()
    finally:
        saver.configure(poison=False)
    assert is_full_of(weights, 7) and is_full_of(scratch, 0xEB)
    assert (weights.data_ptr(), scratch.data_ptr()) == addresses


def test_backups_can_be_pinned_and_kept(saver, prefix):
    allocator = vllm_allocator.Allocator(backup="pinned", retain=True)
    weights = make(saver, allocator, "weights", 12, 9)
    for _ in range(2):
        allocator.sleep(offload_tags="weights")
        assert _core.allocations(f"{prefix}weights")[0].backup == backup_code("pinned")
        allocator.wake_up()
        assert is_full_of(weights, 9)
    assert saver.tags()[f"{prefix}weights"].retained_bytes > 0
