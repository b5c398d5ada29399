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

CPU_ONLY = pytest.mark.sim_only  # NumPy uses CPU tensors without a copy


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
    "NumPy, by DLPack": pytest.param(lambda tensor: numpy.from_dlpack(tensor), marks=CPU_ONLY),
}


@pytest.mark.parametrize(
    "lend", [value if hasattr(value, "marks") else pytest.param(value) for value in PARTNERS.values()], ids=PARTNERS
)
def test_a_partner_of_dlpack_keeps_its_memory_until_it_is_gone(saver, tag, make, lend):
    tensor, other = make(), make()
    address = tensor.data_ptr()
    partner = lend(tensor)
    result = saver.adopt([tensor, other], tag=tag)
    assert (tensor.data_ptr(), tag_of(tensor), tag_of(other)) == (address, None, tag)
    assert (result.storages, result.skipped) == (1, {external_references.LENT_OUT: 1})
    assert "force=True" in str(result)
    del partner
    gc.collect()
    assert saver.adopt(tensor, tag=tag).storages == 1
    assert tag_of(tensor) == tag


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


@pytest.mark.parametrize("force", [None, 1, "yes"], ids=repr)
def test_force_is_a_switch(saver, tag, make, force):
    with pytest.raises(TypeError, match="force is True or False"):
        saver.adopt(make(), tag=tag, force=force)


@CPU_ONLY
@pytest.mark.parametrize("lend", [lambda t: t.numpy(), numpy.asarray, lambda t: numpy.asarray(t[1:])])
@pytest.mark.parametrize("force", [False, True])
def test_what_numpy_had_stays_also_with_force(saver, tag, make, lend, force):
    tensor = make()
    array = lend(tensor)
    assert saver.adopt(tensor, tag=tag, force=force).skipped == {adopt.NOT_OWN: 1}
    array[-1] = 5
    assert float(tensor[-1].sum()) == 40
    del array
    assert saver.adopt(tensor, tag=tag, force=force).skipped == {adopt.NOT_OWN: 1}, "NumPy never says it is done"


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


@pytest.fixture(params=["a Python class of a library that is known to", "a class of an extension"])
def borrower(request, monkeypatch):
    """Such a class of another library."""
    if "Python" in request.param:
        return type("MemoryPointer", (_Borrower,), {"__module__": "numba.cuda.cudadrv.driver"})
    module = types.ModuleType("compiled")
    module.__file__ = "/somewhere/compiled.cpython-311-x86_64-linux-gnu.so"
    monkeypatch.setitem(sys.modules, "compiled", module)
    return type("Memory", (_Borrower,), {"__module__": "compiled"})


@pytest.mark.parametrize("has_dict", [False, True])
@pytest.mark.parametrize("is_frozen", [False, True])
def test_another_librarys_object_that_refers_to_it(saver, tag, make, borrower, is_frozen, has_dict):
    """From Python 3.11 on an object gets a dict for its attributes when somebody asks for it."""
    tensor = make()
    partner = borrower(tensor[2:])
    if has_dict:
        assert vars(partner)["owner"].data_ptr() == partner.address
    if is_frozen:
        gc.freeze()
    assert saver.adopt(tensor, tag=tag).skipped == {external_references.BORROWED: 1}
    del partner
    assert saver.adopt(tensor, tag=tag).storages == 1


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
    gc.collect()
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
