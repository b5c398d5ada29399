"""saver.adopt moves existing tensors into a tag; everything that shares their memory continues to share it."""

import collections
import copy
import dataclasses

import pytest

torch = pytest.importorskip("torch")

from ebbtide import _core  # noqa: E402
from ebbtide.errors import StateError  # noqa: E402
from ebbtide.saver.adoption import adopt  # noqa: E402

pytestmark = pytest.mark.usefixtures("quick_scans")

MIB = 1 << 20


def tag_of(tensor):
    info = _core.find(tensor.data_ptr())
    return None if info is None else info.tag


def test_a_model_and_its_optimizer(saver, tag):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(32, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU(), torch.nn.Linear(64, 32)
    ).to(saver.device)
    model[0].register_buffer("not_saved", torch.ones(5, device=saver.device), persistent=False)
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, twin)]
    data = torch.randn(16, 32, device=saver.device)
    calls = []
    model[0].register_forward_hook(lambda *_: calls.append("hook"))

    def step(m, optimizer):
        m.zero_grad(set_to_none=False)
        m(data).square().mean().backward()
        optimizer.step()

    for m, optimizer in zip((model, twin), optimizers, strict=True):
        step(m, optimizer)
    result = saver.adopt(model, optimizers[0], tag=tag)
    everything = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters())]
    everything += [t for state in optimizers[0].state.values() for t in state.values() if t.device.type == saver.device]
    assert {tag_of(t) for t in everything} == {tag}
    assert result.storages == len({t.untyped_storage()._cdata for t in everything})
    assert result.bytes == sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in everything}.values())
    saver.pause(tag)
    saver.resume(tag)
    for m, optimizer in zip((model, twin), optimizers, strict=True):
        step(m, optimizer)
    assert calls
    for mine, other in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        assert torch.equal(mine, other)
    again = saver.adopt(model, optimizers[0], tag=tag)
    assert (again.storages, again.bytes, again.already) == (0, 0, result.storages)


def test_ties_stay_ties(saver, tag):
    base = torch.arange(100.0, device=saver.device)
    view, other_view, typed = base[10:20], base.view(10, 10).t(), base.view(torch.int32)
    embedding = torch.nn.Embedding(10, 4, device=saver.device)
    head = torch.nn.Linear(4, 10, bias=False, device=saver.device)
    head.weight = embedding.weight
    outside = embedding.weight.data  # known to no other object
    saver.adopt({"base": base}, embedding, tag=tag)
    assert tag_of(view) == tag_of(typed) == tag_of(head.weight) == tag_of(outside) == tag
    base[15] = -1
    assert float(view[5]) == -1
    assert float(other_view[5, 1]) == -1
    assert int(typed[15]) == torch.tensor(-1.0).view(torch.int32).item()
    with torch.no_grad():
        embedding.weight.fill_(7)
    assert float(outside.sum()) == float(head.weight.detach().sum()) == 280


def test_autograd_goes_on(saver, tag):
    leaf = torch.ones(1000, device=saver.device, requires_grad=True)
    result = (leaf * leaf).sum()
    saver.adopt(leaf, tag=tag)
    result.backward()
    assert float(leaf.grad.sum()) == 2000


def test_containers_of_every_kind(saver, tag):
    Pair = collections.namedtuple("Pair", "left right")

    @dataclasses.dataclass
    class Cache:
        key: object
        note: str = "text"

    def make():
        return torch.ones(10, device=saver.device)

    tensors = [make() for _ in range(9)]
    loop = [tensors[0]]
    loop.append(loop)
    things = [
        loop,
        (tensors[1], None, 5),
        Pair(tensors[2], {"deep": [tensors[3]]}),
        Cache(tensors[4]),
        {1: tensors[5], "text": "value"},
        collections.OrderedDict(a=tensors[6]),
        {tensors[7]},
        tensors[8],
    ]
    result = saver.adopt(*things, tag=tag)
    assert {tag_of(t) for t in tensors} == {tag}
    assert result.storages == len(tensors)
    assert result.skipped == {}
    assert tag in str(result)


@pytest.mark.parametrize("thing", [None, 3, "tensor", Ellipsis, torch.float32, dataclasses.dataclass])
def test_what_holds_no_tensors_is_refused_and_nothing_moves(saver, tag, thing):
    tensor = torch.ones(10, device=saver.device)
    with pytest.raises(TypeError, match="adopt takes"):
        saver.adopt(tensor, thing, tag=tag)
    assert tag_of(tensor) is None


def test_nothing_to_adopt(saver, tag):
    assert saver.adopt(tag=tag).bytes == 0
    assert saver.adopt([], {}, torch.nn.Identity(), torch.empty(0, device=saver.device), tag=tag).storages == 0


def test_what_stays_is_counted_with_its_reason(saver, tag):
    numpy = pytest.importorskip("numpy")
    move = torch.ones(10, device=saver.device)
    lent = torch.from_numpy(numpy.ones(10, dtype="float32"))
    shared = torch.ones(10).share_memory_()
    meta = torch.ones(10, device="meta")
    result = saver.adopt([move, lent, shared, meta], tag=tag)
    assert result.storages == 1
    assert result.skipped["on meta, not on " + saver.device] == 1
    if saver.device == "cpu":
        assert result.skipped[adopt.NOT_OWN] == 1
        assert result.skipped["shared between processes"] == 1
    else:
        assert result.skipped["on cpu, not on cuda"] == 2
    assert [tag_of(t) for t in (move, lent, shared)] == [tag, None, None]
    assert "skipped 1" in str(result)


def test_sparse_tensors_give_their_parts(saver, tag):
    dense = torch.eye(20, device=saver.device)
    sparse = [dense.to_sparse(), dense.to_sparse_csr(), dense.to_sparse_csc()]
    saver.adopt(sparse, tag=tag)
    assert {
        tag_of(sparse[0]._indices()),
        tag_of(sparse[0]._values()),
        tag_of(sparse[1].values()),
        tag_of(sparse[2].row_indices()),
    } == {tag}
    assert all(torch.equal(s.to_dense(), dense) for s in sparse)


def test_wrappers_give_what_they_wrap(saver, tag):
    from torch.testing._internal.two_tensor import TwoTensor

    parts = [torch.ones(10, device=saver.device), torch.zeros(10, device=saver.device)]
    saver.adopt(TwoTensor(*parts), tag=tag)
    assert {tag_of(part) for part in parts} == {tag}


def test_from_one_tag_to_another_and_to_another_backup(saver, tag, tag2):
    with saver.region(tag):
        tensor = torch.full((3 * MIB,), 5.0, device=saver.device)
    assert saver.adopt(tensor, tag=tag2).storages == 1
    assert tag_of(tensor) == tag2
    assert saver.adopt(tensor, tag=tag2, backup=None).storages == 1
    assert saver.adopt(tensor, tag=tag2, backup=None).already == 1
    saver.pause(tag2)
    saver.resume(tag2)
    assert int(torch.count_nonzero(tensor)) == 0


def test_a_paused_tensor_is_refused_before_anything_moves(saver, tag, tag2):
    first = torch.ones(10, device=saver.device)
    with saver.region(tag):
        second = torch.ones(10, device=saver.device)
    saver.pause(tag)
    for target in (tag, tag2):
        with pytest.raises(StateError, match=f"resume its tag '{tag}'"):
            saver.adopt(first, second, tag=target)
    assert tag_of(first) is None
    saver.resume(tag)
    assert saver.adopt(first, second, tag=tag2).storages == 2


def test_out_of_memory_midway_loses_nothing(saver, tag):
    tensors = [torch.full((4 * MIB,), float(i), device=saver.device) for i in range(4)]  # 16 MiB each
    # On a GPU, torch keeps the free segments of other pools; the simulated device releases them first.
    held = sum(status.resident_bytes for status in saver.tags().values()) if saver.device == "cuda" else 0
    saver.configure(device_limit=held + 40 * MIB)
    with pytest.raises(torch.OutOfMemoryError):
        saver.adopt(tensors, tag=tag)
    where = [tag_of(t) for t in tensors]
    assert tag in where
    assert None in where
    assert [float(t.sum()) for t in tensors] == [i * 4 * MIB for i in range(4)]
    saver.configure(device_limit=None)
    result = saver.adopt(tensors, tag=tag)
    assert {tag_of(t) for t in tensors} == {tag}
    assert result.already == where.count(tag)
    assert [float(t.sum()) for t in tensors] == [i * 4 * MIB for i in range(4)]


def test_out_of_memory_between_tags_leaves_a_tensor_in_its_tag(saver, tag, tag2, mover):
    with saver.region(tag):
        tensors = [torch.full((4 * MIB,), float(i), device=saver.device) for i in range(2)]  # 16 MiB each
    held = sum(status.resident_bytes for status in saver.tags().values()) if saver.device == "cuda" else 32 * MIB
    saver.configure(device_limit=held + 8 * MIB)
    with pytest.raises(torch.OutOfMemoryError):
        saver.adopt(tensors, tag=tag2)
    assert [tag_of(t) for t in tensors] == [tag, tag]
    assert saver.pause(tag).bytes == 32 * MIB
    saver.configure(device_limit=None)
    saver.resume(tag)
    assert [float(t.sum()) for t in tensors] == [i * 4 * MIB for i in range(2)]
    assert saver.adopt(tensors, tag=tag2).storages == 2
    assert [tag_of(t) for t in tensors] == [tag2, tag2]
    assert [float(t.sum()) for t in tensors] == [i * 4 * MIB for i in range(2)]


def test_inside_another_region(saver, tag, tag2):
    with saver.region(tag2):
        tensor = torch.ones(10, device=saver.device)
        saver.adopt(tensor, tag=tag)
        after = torch.ones(10, device=saver.device)
    assert (tag_of(tensor), tag_of(after)) == (tag, tag2)


def test_a_gradient_that_is_made_later_is_not_in_the_tag(saver, tag):
    parameter = torch.nn.Parameter(torch.ones(10, device=saver.device))
    saver.adopt(parameter, tag=tag)
    parameter.sum().backward()
    assert tag_of(parameter) == tag
    assert tag_of(parameter.grad) is None


def test_expanded_and_lazy_tensors(saver, tag):
    base = torch.arange(4.0, device=saver.device)
    expanded, lazy = base.expand(3, 4), torch.view_as_complex(torch.ones(3, 2, device=saver.device)).conj()
    saver.adopt(expanded, lazy, tag=tag)
    assert tag_of(base) == tag
    assert expanded.tolist() == [[0, 1, 2, 3]] * 3
    assert lazy.tolist() == [1 - 1j] * 3


def test_modules_on_other_devices_are_skipped(saver, tag):
    model = torch.nn.Linear(3, 3, device="meta")
    result = saver.adopt(model, tag=tag)
    assert (result.storages, sum(result.skipped.values())) == (0, 2)
