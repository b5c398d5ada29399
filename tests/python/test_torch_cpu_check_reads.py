"""EBBTIDE_CHECK: reading a paused tensor other than by an op is an error too, and nothing else is."""

import copy
import io
import math
import pickle
import threading

import pytest
import torch
from ebbtide.errors import StateError
from ebbtide.saver.check import ops, reads
from torch.testing._internal.two_tensor import TwoTensor

numpy = pytest.importorskip("numpy")
pytestmark = [pytest.mark.sim_only, pytest.mark.filterwarnings("ignore")]


class Things:
    """Tensors of a tag."""

    def __init__(self):
        self.x = torch.arange(12.0).view(3, 4)
        self.parameter = torch.nn.Parameter(torch.ones(4))
        self.scalar = torch.tensor(1)
        self.sparse = torch.eye(3).to_sparse()
        self.rows = torch.eye(3).to_sparse_csr()
        self.quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
        self.nested = torch.nested.nested_tensor([torch.ones(3), torch.ones(2)])
        self.jagged = torch.nested.nested_tensor([torch.ones(3), torch.ones(2)], layout=torch.jagged)
        self.wrapper = TwoTensor(torch.ones(3), torch.ones(3))
        self.storage = self.x.untyped_storage()


@pytest.fixture
def away(saver, tag):
    """Such tensors, paused."""
    with saver.region(tag):
        things = Things()
    saver.pause(tag)
    return things


def save(thing, **options):
    torch.save(thing, io.BytesIO(), **options)


PLAIN = torch.ones(3, 4)
READS = {
    "repr": lambda a: repr(a.x),
    "str of a parameter": lambda a: str(a.parameter),
    "format": lambda a: f"{a.x}",
    "format of a scalar": lambda a: f"{a.scalar}",
    "repr in a list": lambda a: repr([a.x]),
    "repr of a sparse one": lambda a: repr(a.sparse),
    "repr of a compressed one": lambda a: repr(a.rows),
    "repr of a quantized one": lambda a: repr(a.quantized),
    "repr of a nested one": lambda a: repr(a.nested),
    "repr of a jagged one": lambda a: repr(a.jagged),
    "repr of a wrapper": lambda a: repr(a.wrapper),
    "tolist": lambda a: a.x.tolist(),
    "tolist of a scalar": lambda a: a.scalar.tolist(),
    "item": lambda a: a.scalar.item(),
    "int": lambda a: int(a.scalar),
    "float": lambda a: math.sqrt(a.scalar),
    "bool": lambda a: bool(a.scalar),
    "index": lambda a: [1, 2][a.scalar],
    "numpy": lambda a: a.x.numpy(),
    "numpy by force": lambda a: a.parameter.numpy(force=True),
    "numpy.asarray": lambda a: numpy.asarray(a.x),
    "numpy.array": lambda a: numpy.array(a.x),
    "numpy.from_dlpack": lambda a: numpy.from_dlpack(a.x),
    "a buffer": lambda a: memoryview(a.x.numpy()),
    "__dlpack__": lambda a: a.x.__dlpack__(),
    "from_dlpack": lambda a: torch.from_dlpack(a.parameter.detach()),
    "to_dlpack": lambda a: torch.utils.dlpack.to_dlpack(a.x),
    "torch.to_dlpack": lambda a: torch.to_dlpack(a.x),
    "pickle": lambda a: pickle.dumps(a.x),
    "pickle of a parameter": lambda a: pickle.dumps(a.parameter),
    "save": lambda a: save(a.x),
    "save in a dict": lambda a: save({"a": [a.parameter]}),
    "save of a sparse one": lambda a: save(a.sparse),
    "save of a jagged one": lambda a: save(a.jagged),
    "save in the old format": lambda a: save(a.x, _use_new_zipfile_serialization=False),
    "deepcopy": lambda a: copy.deepcopy(a.x),
    "deepcopy of a parameter": lambda a: copy.deepcopy([a.parameter]),
    "deepcopy of a sparse one": lambda a: copy.deepcopy(a.sparse),
    "apply_": lambda a: a.x.apply_(lambda value: value),
    "map_": lambda a: a.x.map_(PLAIN, lambda left, right: left),
    "map_ of another": lambda a: PLAIN.clone().map_(a.x, lambda left, right: right),
    "new_tensor": lambda a: PLAIN.new_tensor([a.scalar]),
    "an element of the storage": lambda a: a.storage[0],
    "list of the storage": lambda a: a.storage.tolist(),
    "repr of the storage": lambda a: repr(a.storage),
    "clone of the storage": lambda a: a.storage.clone(),
    "fill of the storage": lambda a: a.storage.fill_(1),
    "pickle of the storage": lambda a: pickle.dumps(a.storage),
    "another size of the storage": lambda a: a.storage.resize_(400),
    "byteswap of the storage": lambda a: a.storage.byteswap(torch.float32),
    "assert_close": lambda a: torch.testing.assert_close(a.x, torch.arange(12.0).view(3, 4)),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_each_way_to_read_is_an_error(saver, tag, away, read):
    with ops.enable(), pytest.raises(StateError) as caught:
        read(away)
    assert f"lies in tag {tag!r}, which is paused. Resume {tag!r}" in str(caught.value)
    saver.resume(tag)
    with ops.enable():
        read(away)


def test_the_error_names_the_call_the_shape_and_the_type(tag, away):
    with ops.enable(), pytest.raises(StateError) as caught:
        away.x.tolist()
    assert str(caught.value).startswith("Tensor.tolist: the tensor of shape [3, 4] and torch.float32 ")
    with (
        ops.enable(),
        pytest.raises(StateError, match=r"UntypedStorage.resize_: the storage of 48 bytes lies"),
    ):
        away.storage.resize_(3)


def test_what_reads_nothing_passes(away):
    with ops.enable():
        assert copy.copy(away.x).data_ptr() == away.x.data_ptr()
        assert next(iter(away.x)).shape == (4,)
        assert (hash(away.x), len(away.x), away.x.type()) == (id(away.x), 3, "torch.FloatTensor")
        assert away.x.T.detach().untyped_storage().data_ptr() == away.storage.data_ptr()


def test_other_threads_are_checked_too(away):
    caught = []

    def work():
        try:
            away.x.tolist()
        except StateError as error:
            caught.append(error)

    with ops.enable():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert len(caught) == 1


def test_an_address_for_other_libraries(away, monkeypatch):
    class Readable(torch.Tensor):
        @property
        def __cuda_array_interface__(self):
            return {"data": (self.data_ptr(), False)}

    looked_at = []
    read = reads._checked(Readable.__cuda_array_interface__.fget, "name", lambda *seen: looked_at.append(seen))
    tensor = away.x.as_subclass(Readable)
    read(tensor)
    assert looked_at == []
    with ops.enable():
        read(tensor)
        assert not hasattr(PLAIN, "__cuda_array_interface__")
        with pytest.raises(StateError, match="__cuda_array_interface__"):
            away.x.__cuda_array_interface__  # noqa: B018
    assert [title for title, _ in looked_at] == ["name"]


def test_nothing_is_wrapped_without_a_check(run_python_with_torch):
    done = run_python_with_torch(
        """
        import sys, torch
        before = dict(vars(torch.Tensor))
        from ebbtide import saver
        with saver.region("a"):
            x = torch.ones(3)
        repr(x), x.tolist(), x.numpy()
        now = dict(vars(torch.Tensor))
        changed = {name for name in now if now[name] is not before.get(name)}
        assert changed <= {"__cuda_array_interface__"}, changed
        assert "ebbtide.saver.check.reads" not in sys.modules
        """,
        EBBTIDE_CHECK=None,
    )
    assert done.returncode == 0, done.stderr


CRASH = """
    import os, torch
    from ebbtide import saver
    with saver.region("a"):
        x = torch.ones(3)
    array = x.numpy()
    saver.pause("a")
    print(array)
"""


@pytest.mark.parametrize("value, advice", [("0", "EBBTIDE_CHECK=1 names the op"), ("1", "which is on, cannot see")])
def test_the_line_of_a_crash_does_not_advise_what_is_on(run_python_with_torch, value, advice):
    done = run_python_with_torch(CRASH, EBBTIDE_CHECK=value)
    assert done.returncode < 0
    assert "belongs to tag 'a', which is paused" in done.stderr
    assert advice in done.stderr
