"""A backup for each tag in one pause: `saver.pause({"weights": "ram", "kv_cache": None})`."""

import pytest

torch = pytest.importorskip("torch")

from ebbtide.errors import StateError, StoreError  # noqa: E402
from ebbtide.saver.values.arguments import AS_ALLOCATED  # noqa: E402

MIB = 1 << 20


def block(saver, tag, mib, value=1.0, **options):
    with saver.region(tag, **options):
        return torch.full((mib * MIB // 4,), value, device=saver.device)


def test_a_backup_for_each_tag_in_one_operation(saver, tag, tag2):
    kept, dropped = block(saver, tag, 16, backup=None), block(saver, tag2, 16)
    newest = max((event.sequence for event in saver.timeline), default=0)
    report = saver.pause({tag: "ram", tag2: None})
    assert report.by_tag == {tag: 16 * MIB, tag2: 16 * MIB}
    told = [event.tags for event in saver.timeline if event.sequence > newest]
    assert told == [", ".join(sorted((tag, tag2)))]
    assert saver.tags()[tag].stored_bytes == saver.tags()[tag2].dropped_bytes == 16 * MIB
    saver.resume(tag, tag2)
    assert float(kept.sum()) == 4 * MIB
    assert int(torch.count_nonzero(dropped)) == 0
    dropped.fill_(1.0)
    with saver.paused({tag2: AS_ALLOCATED, tag: "disk"}) as report:
        assert report.by_tag == {tag: 16 * MIB, tag2: 16 * MIB}
    assert float(kept.sum()) == float(dropped.sum()) == 4 * MIB
    saver.pause({tag: None, f"{tag}-never": "ram"}, missing_ok=True)
    assert not saver.is_paused(tag2)
    saver.resume(tag)
    assert int(torch.count_nonzero(kept)) == 0


def test_a_backup_for_each_tag_is_all_or_nothing(saver, tag, tag2):
    kept, dropped = block(saver, tag, 16), block(saver, tag2, 16)
    with pytest.raises(StateError, match="no region was ever named"):
        saver.pause({tag2: None, f"{tag}-never": "ram"})
    saver.configure(host_limit=0)
    try:
        with pytest.raises(StoreError, match="host_limit"):
            saver.pause({tag2: None, tag: "ram"})
    finally:
        saver.configure(host_limit=None)
    assert not saver.is_paused(tag) and not saver.is_paused(tag2)
    assert float(kept.sum()) == float(dropped.sum()) == 4 * MIB


def test_a_backup_for_each_tag_stands_alone(saver, tag, tag2):
    keep = block(saver, tag, 16)
    for wrong in (
        lambda: saver.pause({tag: None}, backup="ram"),
        lambda: saver.pause({tag: None}, tag2),
        lambda: saver.pause(tag2, {tag: None}),
        lambda: saver.pause({1: None}),
        lambda: saver.swap(pause={tag: None}, resume=tag2, backup="ram"),
    ):
        with pytest.raises(TypeError):
            wrong()
    for wrong in (
        lambda: saver.pause({}),
        lambda: saver.pause({tag: "tape"}),
        lambda: saver.pause({"a/b": None}),
        lambda: saver.swap(pause={}, resume=tag),
    ):
        with pytest.raises(ValueError):
            wrong()
    with pytest.raises(ValueError), saver.paused({}):
        pass
    assert float(keep.sum()) == 4 * MIB
    assert not saver.is_paused(tag)
