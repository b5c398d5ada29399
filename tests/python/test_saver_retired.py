"""Pools that are given up: freed and spared memory."""

import pytest

torch = pytest.importorskip("torch")

from ebbtide.saver.pools import backends, captures, region_pools  # noqa: E402
from ebbtide.saver.reclaim import retired  # noqa: E402

MIB = 1 << 20


def make(saver, tag, *sizes_mib):
    with saver.region(tag):
        return [torch.full((mib * MIB,), mib, dtype=torch.uint8, device=saver.device) for mib in sizes_mib]


def sizes(infos):
    return sorted(info.size_bytes for info in infos)


def test_free_segments_go_at_once_and_others_when_they_are_free(saver, tag):
    tensors = make(saver, tag, 12, 14, 16)
    del tensors[1]
    assert sizes(retired.retire([tag])) == [14 * MIB]
    assert region_pools.registry.idle([tag]) == []
    assert all(bool((tensor == tensor.numel() // MIB).all()) for tensor in tensors)
    del tensors[0]
    assert sizes(retired.retire([tag])) == [12 * MIB]
    saver.pause(tag)
    saver.resume(tag)
    assert bool((tensors[0] == 16).all())
    tensors.clear()
    retired.retire([tag])
    assert saver.tags()[tag].size_bytes == 0


def test_what_dies_while_its_tag_is_paused_goes(saver, tag):
    tensors = make(saver, tag, 12, 14)
    retired.retire([tag])
    saver.pause(tag)
    del tensors[0]
    saver.resume(tag)
    assert saver.tags()[tag].size_bytes == 14 * MIB and bool((tensors[0] == 14).all())


def test_a_pool_without_a_free_segment_may_be_spared(saver, tag):
    (first,) = make(saver, tag, 12)
    assert retired.retire([tag], only_with_free_segments=True) == []
    assert len(region_pools.registry.idle([tag])) == 1
    del first
    assert sizes(retired.retire([tag], only_with_free_segments=True)) == [12 * MIB]


def test_an_open_pool_is_spared(saver, tag):
    with saver.region(tag):
        kept = torch.ones(12 * MIB, dtype=torch.uint8, device=saver.device)
        assert retired.retire([tag]) == []
        more = torch.ones(12 * MIB, dtype=torch.uint8, device=saver.device)
    assert saver.tags()[tag].size_bytes == kept.nbytes + more.nbytes


def test_a_pool_that_a_capture_marked_is_spared(saver, tag):
    make(saver, tag, 12)
    ((_, pool),) = region_pools.registry.idle([tag])
    pool.is_captured = True
    assert retired.retire([tag]) == []
    pool.is_captured = False
    assert sizes(retired.retire([tag])) == [12 * MIB]


def test_nothing_happens_during_a_capture(saver, tag, monkeypatch):
    make(saver, tag, 12)
    monkeypatch.setattr(captures, "is_capturing", lambda: True)
    assert retired.retire([tag]) == []
    assert len(region_pools.registry.idle([tag])) == 1


def test_a_torch_that_cannot_dissolve_keeps_the_pool(saver, tag, monkeypatch):
    make(saver, tag, 12)
    monkeypatch.setattr(type(backends.existing_backend()), "dissolve", lambda self, pool: False)
    assert retired.retire([tag]) == []
    before = saver.stats()["pools_made"]
    again = make(saver, tag, 12)
    assert saver.stats()["pools_made"] == before and bool((again[0] == 12).all())


def test_a_process_without_regions_has_nothing(run_python):
    done = run_python("from ebbtide.saver.reclaim import retired; print(retired.retire(['a']))")
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
