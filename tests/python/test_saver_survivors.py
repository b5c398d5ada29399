"""saver.survivors: what lies in a tag, what leads to it, and where it was made."""

import pickle
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from ebbtide.errors import StateError  # noqa: E402
from ebbtide.saver.values.survivors import Survivors  # noqa: E402

pytestmark = pytest.mark.usefixtures("quick_scans")

MIB = 1 << 20


class Model(torch.nn.Module):
    def __init__(self, device):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(512, 512, device=device))
        self.register_buffer("mask", torch.zeros(1 << 16, device=device))


def names(found):
    return [row.held_by for row in found]


def test_a_model_and_its_optimizer_are_named_by_their_attributes(saver, tag):
    with saver.region(tag, threads="all"):
        model = Model(saver.device)
        optimizer = torch.optim.Adam(model.parameters(), foreach=False)
        model.body(torch.ones(4, 512, device=saver.device)).sum().backward()
        optimizer.step()
    found = saver.survivors(tag)
    weight = next(row for row in found if row.held_by == "Model.body.0.weight")
    assert (weight.bytes, weight.kind, weight.shape, weight.dtype) == (MIB, "Parameter", (512, 512), "float32")
    assert weight.address == model.body[0].weight.data_ptr() and weight.device == 0
    wanted = {
        "Model.body.0.weight",
        "Model.body.0.bias",
        "Model.mask",
        "the gradient of Model.body.0.weight",
        "Adam exp_avg of Model.body.0.weight",
        "Adam exp_avg_sq of Model.body.0.bias",
    }
    assert wanted <= set(names(found))
    assert [row.bytes for row in found] == sorted((row.bytes for row in found), reverse=True)


def test_a_paused_tag_is_listed_as_it_is_and_the_dead_are_not(saver, tag):
    with saver.region(tag):
        kept = torch.ones(MIB, device=saver.device)
    found = saver.survivors(tag)
    (resident,) = found
    saver.pause(tag)
    (paused,) = saver.survivors(tag)
    assert replace(paused, held_by=resident.held_by) == resident  # the running line differs
    assert resident.address == kept.data_ptr() and found.bytes == kept.nbytes
    text, table = str(found).splitlines(), found._repr_html_()
    assert text[0] == "1 survivor, 4.0 MiB"
    assert text[1].startswith(f"4.0 MiB at {kept.data_ptr():#x}: Tensor[1048576] float32, kept in test_a_paused_tag")
    assert table.startswith("<table><tr><th>size</th>") and "<td>Tensor[1048576] float32</td>" in table
    del kept
    assert saver.survivors(tag) == [] and len(found) == 1, "the rows keep nothing alive"
    assert pickle.loads(pickle.dumps(found)) == found
    saver.resume(tag)


def test_tensors_that_share_a_storage_are_one_row_and_a_view_alone_shows_all_of_it(saver, tag):
    with saver.region(tag):
        whole = torch.ones(4, MIB, device=saver.device)
        part = torch.ones(2, MIB, device=saver.device)[1]
    views = [whole[0], whole[1:]]
    shared, alone = saver.survivors(tag)
    assert (shared.bytes, shared.shape, shared.views) == (whole.nbytes, (4, MIB), len(views))
    assert alone.bytes == 2 * part.nbytes


def test_variables_modules_and_containers_lead_to_a_tensor(saver, tag, monkeypatch):
    import torch_model

    with saver.region(tag):
        in_a_function = torch.ones(1 << 20, device=saver.device)
        monkeypatch.setattr(torch_model, "planted", torch.ones(1 << 19, device=saver.device), raising=False)
        box = [torch.ones(1 << 18, device=saver.device), {"key": torch.ones(1 << 17, device=saver.device)}]
        box.append({frozenset(): torch.ones(1 << 16, device=saver.device)})  # a key that nobody shows
    found = names(saver.survivors(tag))
    this = "test_variables_modules_and_containers_lead_to_a_tensor"
    assert found[0].startswith(f"in_a_function in {this} (test_saver_survivors.py:")
    assert found[1] == "torch_model.planted"
    assert [name.partition(f" in {this}")[0] for name in found[2:]] == ["box[0]", "box[1]['key']", "a dict"]
    assert in_a_function.numel() > len(box)


def test_what_a_graph_saved_is_a_row_without_a_tensor(saver, tag):
    x = torch.ones(MIB, device=saver.device, requires_grad=True)
    with saver.region(tag):
        y = torch.exp(x * 2).sum()
    found = saver.survivors(tag)
    hidden = [row for row in found if not row.kind and row.bytes >= MIB]
    assert [row.bytes for row in hidden] == [4 * MIB]  # the result of exp
    (shown,) = [row for row in found if row.kind]
    assert (shown.shape, shown.made_by) == ((), "SumBackward0")
    y.backward()
    assert [row for row in saver.survivors(tag) if not row.kind] == []


def test_only_the_tags_own_memory_is_listed_beside_unusual_tensors(saver, tag, tag2):
    with saver.region(tag):
        a = torch.ones(MIB, device=saver.device)
    with saver.region(tag2):
        b = torch.ones(MIB, device=saver.device)
    elsewhere = [
        torch.ones(MIB, device=saver.device),
        torch.nn.LazyLinear(3),
        torch.ones(3).to_sparse(),
        torch.empty(3, device="meta"),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        torch.masked.masked_tensor(torch.ones(2), torch.tensor([True, False])),
    ]
    assert [row.address for row in saver.survivors(tag)] == [a.data_ptr()]
    assert [row.address for row in saver.survivors(tag2)] == [b.data_ptr()]
    assert len(elsewhere) == 6


def test_a_pool_that_was_given_up_is_listed(saver, tag):
    from ebbtide.saver.reclaim import retired

    x = torch.ones(MIB, device=saver.device, requires_grad=True)
    with saver.region(tag):
        y = torch.exp(x)
    retired.retire([tag])
    assert [bool(row.kind) for row in saver.survivors(tag)] == [True]
    total = y.sum()
    del y
    assert [bool(row.kind) for row in saver.survivors(tag)] == [False]
    total.backward()
    assert saver.survivors(tag) == []


def test_an_unknown_tag_is_refused(saver, tag):
    with pytest.raises(StateError, match="unknown"):
        saver.survivors(tag)
    with pytest.raises(TypeError):
        saver.survivors(3)


def test_a_row_prints_its_views_makers_and_frames():
    from ebbtide.saver.values.survivors import Survivor

    frames = ("a.py:1 in f", "b.py:2 in g", "c.py:3 in h", "d.py:4 in i")
    seen = Survivor(MIB, "Tensor", (2, 3), "float32", 2, "x in f (a.py:1)", "MulBackward0", frames, 0, 4096)
    assert str(seen).splitlines() == [
        "1.0 MiB at 0x1000: Tensor[2, 3] float32, 2 more views, x in f (a.py:1), made by MulBackward0",
        "    at a.py:1 in f",
        "    at b.py:2 in g",
        "    at c.py:3 in h",
    ]
    hidden = Survivor(MIB, "", (), "", 0, "", "", (), 0, 4096)
    assert str(Survivors([hidden])).splitlines()[1] == "1.0 MiB at 0x1000: held outside Python's objects"


def test_the_frames_of_a_block_come_from_torchs_history():
    from ebbtide.saver.pools.cuda_pools import read_used_blocks

    frames = [
        {"filename": "/torch/csrc/alloc.cpp", "line": 9, "name": "malloc"},
        {"filename": "/home/train.py", "line": 7, "name": "step"},
    ]
    blocks = [
        {"address": 512, "size": 512, "state": "active_allocated", "frames": frames},
        {"address": 1024, "size": 512, "state": "inactive", "frames": frames},
        {"address": 1536, "size": 512, "state": "active_pending_free"},
    ]
    assert read_used_blocks([{"blocks": blocks}]) == [(512, 512, ("/home/train.py:7 in step",)), (1536, 512, ())]


def test_it_is_empty_where_ebbtide_is_off(run_python):
    done = run_python("from ebbtide import saver; print(saver.survivors('a'))", EBBTIDE_DRIVER="off")
    assert (done.returncode, done.stdout) == (0, "0 survivors, 0 B\n"), done.stderr


def test_what_loads_weights_finds_what_is_registered(saver, tag):
    """A module outside of the model, with buffers alone, is none that weights are loaded into."""
    with saver.region(tag):
        model = Model(saver.device)
        table = torch.nn.Module()
        table.register_buffer("table", torch.zeros(1 << 14, device=saver.device))
        loose = [torch.zeros(1 << 14, device=saver.device)]
    everything = saver.survivors(tag)
    found = {row.address: row.is_registered for row in everything}
    assert {row.address for row in everything.unregistered} == {
        at for at, registered in found.items() if not registered
    }
    assert everything.unregistered.names(1).endswith("(64.0 KiB), 1 more")
    assert found == {
        model.body[0].weight.data_ptr(): True,
        model.body[0].bias.data_ptr(): True,
        model.mask.data_ptr(): True,
        table.table.data_ptr(): False,
        loose[0].data_ptr(): False,
    }
