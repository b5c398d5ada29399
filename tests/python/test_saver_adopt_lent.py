"""saver.adopt does not move a tensor whose address another library may know, and moves every other tensor."""

import gc
import sys
import types

import pytest

torch = pytest.importorskip("torch")
numpy = pytest.importorskip("numpy")

from ebbtide import _core  # noqa: E402
from ebbtide.saver.adoption import adopt, external_references  # noqa: E402
from ebbtide.saver.tensors import address_reads  # noqa: E402

pytestmark = pytest.mark.usefixtures("quick_scans")


def tag_of(tensor):
    info = _core.find(tensor.data_ptr())
    return None if info is None else info.tag


@pytest.fixture
def make(saver):
    """Makes the tensor that is lent."""
    return lambda: torch.arange(64.0, device=saver.device).view(8, 8)


PARTNERS = {
    "torch": torch.from_dlpack,
    "torch, of a view": lambda tensor: torch.from_dlpack(tensor[2:].t()),
    "torch, of a detached alias": lambda tensor: torch.from_dlpack(tensor.detach()),
    "a capsule that nobody has taken": lambda tensor: tensor.__dlpack__(),
    "a capsule of the old way": torch.utils.dlpack.to_dlpack,
    "a partner of a partner": lambda tensor: torch.from_dlpack(torch.from_dlpack(tensor)),
    "NumPy, by DLPack": lambda tensor: numpy.from_dlpack(tensor),
}


def test_partners_of_dlpack_keep_its_memory_until_they_are_gone(saver, tag, make):
    ways = {name: lend for name, lend in PARTNERS.items() if saver.device == "cpu" or "NumPy" not in name}
    lent, other = {name: make() for name in ways}, make()
    places = {name: (tensor.data_ptr(), None) for name, tensor in lent.items()}
    partners = {name: lend(lent[name]) for name, lend in ways.items()}
    result = saver.adopt([*lent.values(), other], tag=tag)
    assert {name: (tensor.data_ptr(), tag_of(tensor)) for name, tensor in lent.items()} == places
    assert (result.storages, result.skipped) == (1, {external_references.LENT_OUT: len(ways)})
    assert tag_of(other) == tag and "force=True" in str(result)
    del partners
    assert saver.adopt(list(lent.values()), tag=tag).storages == len(ways)
    assert {name: tag_of(tensor) for name, tensor in lent.items()} == dict.fromkeys(ways, tag)


def test_a_partner_of_a_parameter(saver, tag):
    model = torch.nn.Linear(8, 8, device=saver.device)
    model(torch.ones(2, 8, device=saver.device)).sum().backward()
    partners = [torch.from_dlpack(model.weight.detach()), torch.from_dlpack(model.bias.grad)]
    assert saver.adopt(model, tag=tag).skipped == {external_references.LENT_OUT: 2}
    assert [tag_of(t) for t in (model.weight, model.weight.grad, model.bias, model.bias.grad)] == [None, tag, tag, None]
    partners[0].fill_(3)
    assert float(model.weight.detach().sum()) == 192


def test_a_partner_of_a_buffer_that_only_a_view_is_adopted_of(saver, tag, make):
    base = make()
    partner = torch.from_dlpack(base)
    view = base[3]
    del base
    assert saver.adopt(view, tag=tag).skipped == {external_references.LENT_OUT: 1}
    del partner
    assert saver.adopt(view, tag=tag).storages == 1


def test_force_moves_what_may_be_lent_out(saver, tag, make):
    tensor = make()
    partner = torch.from_dlpack(tensor)
    old = tensor.data_ptr()
    keep_alive = tensor.detach().clone()
    assert saver.adopt(tensor, tag=tag, force=True).storages == 1
    assert tag_of(tensor) == tag
    assert partner.data_ptr() == old
    assert torch.equal(tensor, keep_alive)


def test_force_is_a_switch(saver, tag, make):
    for force in (None, 1, "yes"):
        with pytest.raises(TypeError, match="force is True or False"):
            saver.adopt(make(), tag=tag, force=force)


@pytest.mark.sim_only  # NumPy uses CPU tensors without a copy
@pytest.mark.parametrize("force", [False, True])
def test_what_numpy_had_stays_also_with_force(saver, tag, make, force):
    tensors = [make() for _ in range(3)]
    arrays = [tensors[0].numpy(), numpy.asarray(tensors[1]), numpy.asarray(tensors[2][1:])]
    assert saver.adopt(tensors, tag=tag, force=force).skipped == {adopt.NOT_OWN: 3}
    for array in arrays:
        array[-1] = 5
    assert [float(tensor[-1].sum()) for tensor in tensors] == [40] * 3
    del array, arrays
    assert saver.adopt(tensors, tag=tag, force=force).skipped == {adopt.NOT_OWN: 3}, "NumPy never says it is done"


def test_what_is_in_the_tag_already_is_not_asked(saver, tag, make):
    with saver.region(tag):
        tensor = make()
    partner = torch.from_dlpack(tensor)
    result = saver.adopt(tensor, tag=tag)
    assert (result.already, result.skipped) == (1, {})
    assert partner.data_ptr() == tensor.data_ptr()


class _Borrower:
    """Stores an address beside the tensor, as classes of other libraries do."""

    def __init__(self, tensor):
        self.owner, self.address = tensor, tensor.data_ptr()


@pytest.fixture
def borrowers(monkeypatch):
    """Such classes of other libraries: a Python class of one that is known to, and a class of an extension."""
    module = types.ModuleType("compiled")
    module.__file__ = "/somewhere/compiled.cpython-311-x86_64-linux-gnu.so"
    monkeypatch.setitem(sys.modules, "compiled", module)
    return [
        type("MemoryPointer", (_Borrower,), {"__module__": "numba.cuda.cudadrv.driver"}),
        type("Memory", (_Borrower,), {"__module__": "compiled"}),
    ]


@pytest.mark.parametrize("is_frozen", [False, True])
def test_another_librarys_object_that_refers_to_it(saver, tag, make, borrowers, is_frozen):
    """From Python 3.11 on an object gets a dict for its attributes when somebody asks for it."""
    tensors = [make() for _ in range(4)]
    partners = [borrower(tensor[2:]) for borrower, tensor in zip(borrowers * 2, tensors, strict=True)]
    assert all(vars(partner)["owner"].data_ptr() == partner.address for partner in partners[2:])
    if is_frozen:
        gc.freeze()
    assert saver.adopt(tensors, tag=tag).skipped == {external_references.BORROWED: 4}
    gc.unfreeze()  # the rest takes a sixth of the time
    del partners
    assert saver.adopt(tensors, tag=tag).storages == 4


def test_types_that_are_made_in_c_may_keep_addresses():
    assert external_references._may_keep_addresses(numpy.nditer)
    for harmless in (
        dict,
        type(lambda: None),
        torch.nn.Linear,
        torch.Tensor,
        torch.Generator,
        _Borrower,
        types.CellType,
    ):
        assert not external_references._may_keep_addresses(harmless)


def test_plain_objects_frames_and_closures_are_no_borrowers(saver, tag, make):
    tensor = make()
    holder = _Borrower(tensor)

    def closure():
        return tensor

    def generator():
        mine = tensor
        yield mine

    running = generator()
    next(running)
    assert saver.adopt({"a": [tensor]}, tag=tag).storages == 1
    assert closure() is holder.owner is next(iter([tensor]))
    running.close()


class _Readable(torch.Tensor):
    """Has the property that torch gives to CUDA tensors only."""

    @property
    def __cuda_array_interface__(self):
        return {"data": (self.data_ptr(), False)}


def test_an_address_that_was_read_keeps_the_tensor_where_it_is(saver, tag, make):
    saver.adopt(tag=tag)  # the first use installs the hooks
    address_reads.install(_Readable)
    tensor = make()
    alias = tensor.as_subclass(_Readable)
    assert alias.__cuda_array_interface__["data"][0] == tensor.data_ptr()
    assert saver.adopt(tensor, tag=tag).skipped == {external_references.ADDRESS_READ: 1}
    del alias
    assert saver.adopt(tensor, tag=tag).storages == 1


def test_the_first_region_begins_to_note_reads(saver, tag):
    with saver.region(tag):
        pass
    read = torch.Tensor.__dict__["__cuda_array_interface__"].fget
    names = []
    while read is not None:  # EBBTIDE_CHECK of another test may lie above
        names.append(read.__code__.co_name)
        read = getattr(read, "__wrapped__", None)
    assert any("noting" in name for name in names), names
    assert saver.device == "cuda" or not hasattr(torch.ones(1), "__cuda_array_interface__")
