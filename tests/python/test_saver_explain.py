"""`saver.explain` names every block that a pause copied, and `saver.where` tells where a tensor's bytes are."""

import json
import random

import pytest

torch = pytest.importorskip("torch")

from ebbtide import _core  # noqa: E402
from ebbtide.errors import StateError  # noqa: E402
from ebbtide.saver.survey import contents  # noqa: E402
from random_memory import random_bytes  # noqa: E402

pytestmark = pytest.mark.usefixtures("quick_scans")

MIB = 1 << 20
BLOCK = 2 * MIB


def noise(saver, tag, mib, **options):
    with saver.region(tag, **options):
        return random_bytes(mib * MIB, saver.device)


@pytest.fixture
def without_names(monkeypatch):
    """No look at every object of the process, for tests of what became of blocks."""
    monkeypatch.setattr(contents, "_tensors_in", lambda blocks: [])
    return monkeypatch


def blocks_of(explanation, verdict):
    return {
        address + offset
        for address, size_bytes, found in explanation.blocks
        if found == verdict
        for offset in range(0, size_bytes, BLOCK)
    }


def test_the_first_pause_copies_and_the_next_only_what_changed(saver, tag, without_names):
    data = noise(saver, tag, 16, retain=True)
    assert saver.explain(tag).blocks == ()
    saver.pause(tag)
    first = saver.explain(tag)
    assert (first.copied, first.changed, first.clean) == (16 * MIB, 0, 0)
    saver.resume(tag)
    data[5 * MIB] ^= 1
    saver.pause(tag)
    second = saver.explain(tag)
    assert (second.copied, second.changed, second.clean) == (0, BLOCK, 14 * MIB)
    assert blocks_of(second, "changed") == {data.data_ptr() + 4 * MIB}
    saver.resume(tag)
    assert saver.explain(tag).blocks == second.blocks, "the answer stays until the next pause"


def test_it_names_the_tensors_in_the_blocks(saver, tag):
    with saver.region(tag, retain=True):
        model = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.Linear(1024, 1024)).to(saver.device)
    saver.pause(tag)
    saver.resume(tag)
    with torch.no_grad():
        model[1].weight[7, 9] += 1
    saver.pause(tag)
    explanation = saver.explain(tag)
    names = {tensor.name: tensor for tensor in explanation.tensors}
    assert names["Sequential.1.weight"].changed == names["Sequential.1.weight"].bytes > 0
    assert "Sequential.0.weight" not in names or names["Sequential.0.weight"].bytes < 4 * MIB
    assert explanation.changed == sum(tensor.bytes for tensor in explanation.tensors) + explanation.unnamed
    text = str(explanation)
    assert "had changed since they were last stored" in text
    assert "Sequential.1.weight" in text
    saver.resume(tag)


def block_of(starts, address):
    start = max(each for each in starts if each <= address)
    return address - (address - start) % BLOCK


def test_on_a_random_walk_every_named_block_changed_and_every_changed_one_is_named(saver, tag, without_names):
    chooser, made = random.Random(7), torch.Generator(device=saver.device).manual_seed(7)
    tensors = [noise(saver, tag, mib, retain=True) for mib in (2, 6, 14, 1, 3)]
    saver.pause(tag)
    saver.resume(tag)
    for step in range(14):
        before = [tensor.clone() for tensor in tensors]
        for _ in range(chooser.randrange(4)):
            tensor = chooser.choice(tensors)
            tensor[chooser.randrange(len(tensor))] ^= chooser.randrange(1, 256)
        if step % 6 == 1:  # a write that leaves everything as it was
            tensors[2][9] ^= 5
            tensors[2][9] ^= 5
        is_whole = step in (6, 7, 8, 11, 12)  # then the pause after it expects everything to change again
        if is_whole:
            for tensor in tensors:
                tensor.random_(0, 256, generator=made)
        starts = {info.address for info in _core.allocations(tag)}
        changed = {
            block_of(starts, tensor.data_ptr() + index)
            for tensor, old in zip(tensors, before, strict=True)
            for index in (range(0, len(tensor), 4096) if is_whole else (tensor != old).nonzero().flatten().tolist())
        }
        report = saver.pause(tag)
        if step % 4 == 3:
            without_names.undo()  # from here to the resume
        explanation = saver.explain(tag)
        assert blocks_of(explanation, "changed") == changed, step
        assert blocks_of(explanation, "copied").isdisjoint(changed)
        assert explanation.copied == explanation.uncompared, "an earlier copy of each block is known"
        assert explanation.changed + explanation.copied == report.copied
        assert (explanation.clean, explanation.unused) == (report.clean, report.unused)
        assert sum(tensor.bytes for tensor in explanation.tensors) + explanation.unnamed == report.copied
        assert bool(explanation.tensors) == (step % 4 == 3 and report.copied > 0)
        saver.resume(tag)
        without_names.setattr(contents, "_tensors_in", lambda blocks: [])


def test_tensors_that_share_a_changed_block_are_not_said_to_have_changed(saver, tag):
    with saver.region(tag, retain=True):
        layers = {f"layer{number}": [torch.rand(64, device=saver.device)] for number in range(9)}
    saver.pause(tag)
    saver.resume(tag)
    layers["layer7"][0].add_(1)
    saver.pause(tag)
    explanation = saver.explain(tag)
    assert explanation.changed == BLOCK and len(explanation.tensors) == 9
    text = str(explanation)
    assert ": a block of 2.0 MiB, with 9 tensors. One changed byte moves its block" in text
    names = {tensor.name.partition(" in ")[0] for tensor in explanation.tensors}
    assert names == {f"layers['layer{number}'][0]" for number in range(9)}
    saver.resume(tag)


def test_what_was_dropped_or_freed_since_is_told_apart_from_no_pause(saver, tag):
    data = noise(saver, tag, 2)
    assert str(saver.explain(tag)) == f"{tag}: not paused yet"
    saver.pause(tag)
    saver.resume(tag)
    saver.pause(tag, backup=None)
    dropped = saver.explain(tag)
    assert dropped.blocks == () and dropped.dropped >= 2 * MIB and dropped.was_paused
    assert str(dropped).startswith(f"{tag}: the last pause copied 0 B and left out ")
    assert str(dropped).endswith("dropped without a backup")
    saver.resume(tag)
    assert len(data) == 2 * MIB
    del data
    saver.trim(tag)
    assert "it was freed, or given back by a trim" in str(saver.explain(tag))


def test_what_lies_on_the_host_has_no_verdict_of_an_earlier_pause(saver, tag):
    kept = noise(saver, tag, 16, retain=True)
    saver.pause(tag)
    saver.resume(tag)
    saver.demote(tag)
    assert saver.pause(tag).copied == 0
    found = saver.explain(tag)
    assert (found.copied, found.changed, found.on_host, found.tensors) == (0, 0, 16 * MIB, ())
    assert str(found) == f"{tag}: the last pause copied 0 B and left out 16.0 MiB on the host"
    saver.resume(tag)
    assert len(kept) == 16 * MIB


def test_what_was_one_value_and_is_not_any_more_has_changed(saver, tag, without_names):
    with saver.region(tag, retain=True):
        data = torch.zeros(16 * MIB, dtype=torch.uint8, device=saver.device)
    saver.pause(tag)
    assert saver.explain(tag).constant == 16 * MIB
    saver.resume(tag)
    data.random_(0, 256)
    saver.pause(tag)
    assert (saver.explain(tag).changed, saver.explain(tag).copied) == (16 * MIB, 0)
    saver.resume(tag)


def test_an_earlier_copy_that_nobody_looked_at_is_no_missing_one(saver, tag, without_names):
    kept = noise(saver, tag, 16, retain=True)
    saver.pause(tag)
    saver.resume(tag)
    saver.configure(skip_clean=False)
    try:
        saver.pause(tag)
    finally:
        saver.configure(skip_clean=True)
    found = saver.explain(tag)
    assert (found.copied, found.uncompared) == (16 * MIB, 16 * MIB) == (len(kept), len(kept))
    assert {verdict for _, _, verdict in found.blocks} == {"copied"}
    assert "had no earlier copy" not in str(found) and "skip_clean was off" in str(found)
    saver.resume(tag, retain=False)
    saver.pause(tag)
    text = str(saver.explain(tag))
    assert "had no earlier copy" in text and "resume(retain=False) does not" in text
    saver.resume(tag)


def test_names_are_those_of_what_lies_there_now(saver, tag):
    region = saver.region(tag, retain=True)
    with region:
        before = random_bytes(16 * MIB, saver.device)
    saver.pause(tag)
    assert [each.name.partition(" ")[0] for each in saver.explain(tag).tensors] == ["before"]
    saver.resume(tag)
    del before
    with region:
        after = torch.zeros(16 * MIB, dtype=torch.uint8, device=saver.device)
    text = str(saver.explain(tag)).splitlines()
    assert text[-2] == "  in these blocks now:" and text[-1].startswith("    16.0 MiB of after in ")
    assert len(after) == 16 * MIB


def test_the_table_of_tags_shows_the_backup_that_holds_the_bytes(saver, tag):
    kept = noise(saver, tag, 2)
    saver.pause(tag, backup="disk")
    assert saver.tags()[tag].backups == ("disk",)
    saver.resume(tag)
    assert saver.tags()[tag].backups == ("ram",) and len(kept) == 2 * MIB


def test_explain_refuses_what_is_no_known_tag(saver, tag):
    for ask in (saver.explain, saver.survivors, lambda unknown: saver.outside(torch.ones(3), tag=unknown)):
        with pytest.raises(StateError, match="no region was ever named") as refused:
            ask(tag)
        assert "missing_ok" not in str(refused.value), "none of these has it"
    with pytest.raises(StateError, match="missing_ok"):
        saver.pause(tag)
    with pytest.raises(TypeError):
        saver.explain(7)


def test_where_a_tensor_is(saver, tag):
    outside = torch.ones(3, device=saver.device)
    assert str(saver.where(outside)) == "12 B outside of ebbtide"
    assert saver.where(outside).tag is None
    data = noise(saver, tag, 8)
    here = saver.where(data)
    assert (here.tag, here.device, here.device_bytes) == (tag, 0, 8 * MIB)
    saver.demote(tag)
    assert (saver.where(data).host_bytes, saver.where(data).device_bytes) == (8 * MIB, 0)
    assert saver.promote(tag).note == ""
    saver.pause(tag)
    assert str(saver.where(data[: MIB + 1])) == f"1.0 MiB stored (tag {tag})"
    assert saver.where(data[:0]).stored_bytes == 0
    saver.resume(tag)
    saver.pause(tag, backup=None)
    assert saver.where(data).dropped_bytes == 8 * MIB
    assert json.loads(saver.where(data).to_json())["dropped_bytes"] == 8 * MIB
    saver.resume(tag)
    with pytest.raises(TypeError, match="plain strided tensor"):
        saver.where([data])
    with pytest.raises(TypeError, match="plain strided tensor"):
        saver.where(torch.eye(3).to_sparse())


def test_where_the_bytes_of_unusual_tensors_are(saver, tag):
    with saver.region(tag):
        nested = torch.nested.nested_tensor([torch.ones(20), torch.ones(30)], device=saver.device)
        plain = torch.rand(100, device=saver.device)
        quantized = torch.quantize_per_tensor(plain, 0.1, 0, torch.qint8)
    assert saver.where(nested).device_bytes >= 200 and saver.where(quantized).device_bytes == 100
    saver.pause(tag)
    assert saver.where(nested).stored_bytes >= 200 and saver.where(quantized).stored_bytes == 100
    saver.resume(tag)


def test_a_promotion_that_stops_says_at_which_chunk(saver, tag):
    data = noise(saver, tag, 16)
    saver.demote(tag)
    saver.configure(device_limit=saver.stats()["device_bytes"] + 4 * MIB)
    report = saver.promote(tag)
    assert report.bytes < 16 * MIB
    assert report.note.startswith("device 0: the next chunk has "), report.note
    assert report.note in str(report)
    saver.configure(device_limit=None)
    assert saver.promote(tag).note == ""
    assert saver.where(data).device_bytes == 16 * MIB


def test_results_as_dictionaries_json_and_html(saver, tag, tag2):
    kept = noise(saver, tag, 16), noise(saver, tag2, 12, backup="pinned")
    report = saver.pause(tag, tag2)
    assert {row.tag: row.copied for row in report.rows} == {tag: 16 * MIB, tag2: 12 * MIB}
    shown = report.to_dict()
    assert shown["by_tag"] == {tag: 16 * MIB, tag2: 12 * MIB}
    assert [row["tag"] for row in shown["rows"]] == [row.tag for row in report.rows]
    assert json.loads(report.to_json())["copied"] == sum(map(len, kept))
    table = saver.tags()
    assert table[tag].backups == ("ram",)
    assert table[tag2].backups == ("pinned",)
    assert json.loads(table.to_json())[tag]["backups"] == ["ram"]
    assert f"<td>{tag}</td>" in table._repr_html_()
    assert "pinned" in str(table)
    assert report._repr_html_().startswith("<pre>pause: freed ")
    assert saver.timeline[-1].to_dict()["kind"] == "pause"
    saver.resume(tag, tag2)


def test_settings_can_be_read_and_set_again(saver):
    before = saver.settings()
    assert before["skip_clean"] is True
    assert before["device_limit"] is None
    saver.configure(device_limit="3GiB", skip_clean=False, host_margin="5MiB")
    found = saver.settings()
    assert (found["device_limit"], found["skip_clean"], found["host_margin"]) == (3 << 30, False, 5 * MIB)
    saver.configure(**before)
    assert saver.settings() == before
    saver.configure(disk_directory=None)  # chosen by nobody again
