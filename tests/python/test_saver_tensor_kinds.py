"""Passes every kind of tensor that torch makes, also paused ones, to every public function that takes tensors. Each
call gives a result, a counted skip, or an error of ebbtide, never an error of torch and never a crash."""

import copy

import pytest

torch = pytest.importorskip("torch")

from ebbtide.errors import StateError  # noqa: E402
from torch._subclasses import FakeTensorMode  # noqa: E402
from torch.testing._internal.two_tensor import TwoTensor  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("quick_scans")]


def inside(transform):
    def make(device):
        kept = []
        shape = (3,) if transform is torch.func.grad else (3, 2)
        transform(lambda x: (kept.append(x), x.sum())[1])(torch.ones(shape, device=device))
        return kept[0]

    return make


def make_fake(device):
    with FakeTensorMode(allow_non_fake_inputs=True):
        return torch.nn.Parameter(torch.ones(3, device=device))


def make_dual(device):
    with torch.autograd.forward_ad.dual_level():
        return torch.autograd.forward_ad.make_dual(torch.ones(3, device=device), torch.ones(3, device=device))


def make_inference(device):
    with torch.inference_mode():
        return torch.ones(3, device=device)


def make_freed(device):
    tensor = torch.ones(3, device=device)
    tensor.untyped_storage().resize_(0)
    return tensor


def ones(*shape, **options):
    return lambda device: torch.ones(shape, device=device, **options)


def of(make, *parents):
    return lambda device: make(*(parent(device) for parent in parents))


MATRIX = ones(4, 4)
COMPLEX = ones(3, dtype=torch.complex64)
# kind -> (how to make it, whether it is adopted, the words of backup_of's TypeError)
KINDS = {
    "lazy": (lambda device: torch.nn.LazyLinear(3, device=device).weight, False, "an uninitialized parameter"),
    "lazy buffer": (lambda device: torch.nn.LazyBatchNorm1d(device=device).running_mean, False, "uninitialized"),
    "fake": (make_fake, False, "a fake tensor"),
    "meta": (lambda device: torch.ones(3, device="meta"), False, None),
    "functional": (of(torch._to_functional_tensor, ones(3)), False, "a functional tensor"),
    "inside grad": (inside(torch.func.grad), False, "torch.func"),
    "inside vmap": (inside(torch.func.vmap), False, "torch.func"),
    "nested": (lambda d: torch.nested.nested_tensor([torch.ones(3), torch.ones(2)], device=d), True, "a nested tensor"),
    "jagged": (
        lambda d: torch.nested.nested_tensor([torch.ones(3), torch.ones(2)], layout=torch.jagged, device=d),
        True,
        "a NestedTensor: ask for the tensors that it wraps",
    ),
    "quantized": (lambda d: torch.quantize_per_tensor(torch.ones(3, device=d), 0.1, 0, torch.qint8), True, "quantized"),
    "coo": (of(torch.Tensor.to_sparse, MATRIX), True, "sparse_coo"),
    "csr": (of(torch.Tensor.to_sparse_csr, MATRIX), True, "sparse_csr"),
    "csc": (of(torch.Tensor.to_sparse_csc, MATRIX), True, "sparse_csc"),
    "bsr": (of(lambda t: t.to_sparse_bsr(2), MATRIX), True, "sparse_bsr"),
    "bsc": (of(lambda t: t.to_sparse_bsc(2), MATRIX), True, "sparse_bsc"),
    "wrapper": (of(TwoTensor, ones(3), ones(3)), True, "a TwoTensor: ask for the tensors that it wraps"),
    "masked": (of(lambda t: torch.masked.masked_tensor(t, t > 0), ones(3)), False, None),
    "zeros": (lambda device: torch._efficientzerotensor(3, device=device), False, None),
    "empty": (ones(0), False, None),
    "freed": (make_freed, False, None),
    "scalar": (ones(), True, None),
    "expanded": (of(lambda t: t.expand(4), ones(1)), True, None),
    "conjugate": (of(torch.conj, COMPLEX), True, None),
    "negative": (of(torch._neg_view, ones(3)), True, None),
    "real part": (of(torch.real, COMPLEX), True, None),
    "copy on write": (of(torch._lazy_clone, ones(3)), True, None),
    "inference": (make_inference, True, None),
    "dual": (make_dual, True, None),
    "parameter": (of(torch.nn.Parameter, ones(3)), True, None),
    "subclass": (of(lambda t: t.as_subclass(type("Own", (torch.Tensor,), {})), ones(3)), True, None),
    "float8": (of(lambda t: t.to(torch.float8_e4m3fn), ones(3)), True, None),
    "bits": (of(lambda t: t.view(torch.bits8), ones(3, dtype=torch.uint8)), True, None),
}


@pytest.fixture(params=KINDS)
def kind(request, saver):
    """How to make one kind of tensor, whether it is adopted, and the words of backup_of's error."""
    if request.param in ("quantized",) and saver.device == "cuda":
        return KINDS["scalar"]  # torch quantizes on the CPU
    return KINDS[request.param]


def look_at_all(saver, tag, tensor, words):
    """Calls backup_of, and the functions that take tensors to choose what comes first."""
    if words:
        with pytest.raises(TypeError, match=words) as caught:
            saver.backup_of(tensor)
        assert str(caught.value).startswith("backup_of takes a plain strided tensor, not ")
        stored = None
    else:
        try:
            stored = saver.backup_of(tensor)
        except StateError as error:
            # Of memory that others have, or nobody.
            assert "not in memory of ebbtide" in str(error)
            stored = None
    known = f"{tag}-known"
    with saver.region(known):
        pass
    assert saver.resume(known, order=[tensor]).kind == "resume"
    pending = saver.resume(known, wait=False, order=tensor)
    assert pending.ready(tensor) is True
    pending.stream_wait(tensors=[tensor])
    pending.wait()
    return stored


def test_a_tensor_outside_all_regions(saver, tag, kind):
    make, is_adopted, words = kind
    tensor = make(saver.device)
    assert look_at_all(saver, tag, tensor, words) is None
    result = saver.adopt(tensor, tag=tag)
    assert (result.storages > 0) is is_adopted, str(result)
    assert sum(result.skipped.values()) + result.storages > 0 or tensor.untyped_storage().nbytes() == 0
    assert saver.adopt([tensor], {"again": tensor}, tag=tag).already == result.storages
    saver.pause(tag)
    saver.resume(tag)


def test_a_paused_tensor(saver, tag, kind):
    make, is_adopted, words = kind
    with saver.region(tag):
        tensor = make(saver.device)
    saver.pause(tag)
    stored = look_at_all(saver, tag, tensor, words)
    assert (stored is not None) is (is_adopted and not words)
    if is_adopted:
        with pytest.raises(StateError, match=f"resume its tag '{tag}' first"):
            saver.adopt(tensor, tag=f"{tag}-other")
    else:
        assert saver.adopt(tensor, tag=f"{tag}-other").storages == 0
    del stored
    saver.resume(tag)


def test_modules_that_are_not_initialized_yet(saver, tag):
    model = torch.nn.Sequential(torch.nn.LazyLinear(4), torch.nn.Linear(4, 4)).to(saver.device)
    result = saver.adopt(model, tag=tag)
    assert (result.storages, result.skipped) == (2, {"an uninitialized parameter: it has no memory to move": 2})
    model(torch.ones(2, 3, device=saver.device)).sum().backward()
    assert saver.adopt(model, tag=tag).skipped == {}


@pytest.mark.sim_only  # on a GPU all of them lie in the region
def test_what_deep_copies_lie_outside_on_the_simulated_device(saver, tag):
    """As docs/simulated_device.md says. An adoption moves them."""
    with saver.region(tag):
        layer = torch.nn.BatchNorm1d(1000)
        plain = torch.ones(1000)
        copied = copy.deepcopy([layer, plain])
        clone = plain.clone()
    lies_in = {"weight": copied[0].weight, "clone": clone}
    lies_outside = {"buffer": copied[0].running_mean, "plain": copied[1]}
    assert all(saver.where(tensor).tag == tag for tensor in lies_in.values())
    assert all(saver.where(tensor).tag is None for tensor in lies_outside.values())
    saver.adopt(copied, tag=tag)
    assert all(saver.where(tensor).tag == tag for tensor in lies_outside.values())
    assert torch.equal(copied[1], plain)
