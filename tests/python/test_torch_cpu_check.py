"""EBBTIDE_CHECK: an op on a tensor of a paused tag is refused with its name, and every other op passes."""

import copy
import gc
import threading

import pytest
import torch
from ebbtide import _core, torch_extension
from ebbtide.errors import StateError
from ebbtide.saver.check import enabling, ops
from op_checks import checked, end
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.sim_only


@pytest.fixture
def make(request):
    """Makes tensors in a tag of the test's own. The tag is resident again at the end."""
    _core.use_driver("sim")
    extension = torch_extension.load()
    extension.install()
    tag = request.node.name
    pool = extension.pool_create(_core.bind_slot(tag, 0, 1), tag)

    def build(function):
        extension.pool_enter(pool)
        try:
            return function()
        finally:
            extension.pool_leave(pool)

    build.tag = tag
    yield build
    _core.resume([tag])


@pytest.fixture
def paused(make):
    tensor = make(lambda: torch.arange(12.0).view(3, 4))
    _core.pause([make.tag])
    return tensor


def test_the_error_names_op_shape_and_tag(paused, make):
    with checked(), pytest.raises(StateError) as caught:
        torch.add(torch.ones(3, 4), paused)
    message = str(caught.value)
    assert "aten.add.Tensor" in message and "'other'" in message
    assert "[3, 4]" in message and "torch.float32" in message and repr(make.tag) in message
    _core.resume([make.tag])
    with checked():
        assert torch.equal(torch.add(torch.zeros(3, 4), paused), torch.arange(12.0).view(3, 4))


@pytest.mark.parametrize(
    "op",
    [
        lambda x: x.sum(),
        lambda x: x.t().contiguous(),
        lambda x: x[1:, ::2] + 1,
        lambda x: x.add_(1),
        lambda x: torch.cat([torch.ones(3, 4), x]),
        lambda x: torch.stack((x, x)),
        lambda x: torch.add(torch.ones(3, 4), 1, out=x),
        lambda x: torch.where(torch.ones(3, 4) > 0, 1.0, x),
        lambda x: torch.ones(3, 4)[x.select(1, 0) > 0],
        lambda x: torch.ones(3, 4).copy_(x),
        lambda x: x.reshape(2, 6).t().reshape(12),
        lambda x: x[0, 0].item(),
        lambda x: x.clone(),
        lambda x: torch.nn.functional.linear(torch.ones(2, 4), x),
        lambda x: torch.nn.functional.scaled_dot_product_attention(x[None], x[None], x[None]),
        lambda x: x.to(torch.float64),
        lambda x: x.resize_(100),
        lambda x: torch._foreach_add([torch.ones(1), x], 1.0),
    ],
)
@pytest.mark.parametrize("is_inference", [False, True])
def test_ops_on_paused_memory_are_refused(op, is_inference, make):
    with torch.inference_mode(is_inference):
        tensor = make(lambda: torch.arange(12.0).view(3, 4))
        _core.pause([make.tag])
        with checked(), pytest.raises(StateError, match="is paused"):
            op(tensor)


@pytest.mark.parametrize(
    "op",
    [
        lambda x: x.view(12)[3:].t(),
        lambda x: x.detach().requires_grad_(),
        lambda x: x.split(1)[0].unsqueeze(0).expand(5, -1, -1),
        lambda x: torch.zeros_like(x) + torch.empty_like(x).zero_() + x.new_ones(3, 4),
        lambda x: (x.shape, x.stride(), x.data_ptr(), x.is_contiguous(), x.element_size()),
        lambda x: torch.nn.Parameter(x),
        lambda x: torch.ones(4)[None] + torch.zeros(3, 4),
        lambda x: x[:0] + 1,
        lambda x: torch.nn.Linear(4, 4).state_dict(),
        lambda x: x.squeeze_().unsqueeze_(0).squeeze_(),
    ],
)
def test_what_touches_no_byte_of_it_passes(op, paused):
    with checked():
        op(paused)


def test_views_of_paused_memory_are_paused_and_neighbours_are_not(make):
    resident, paused = torch.ones(4), make(lambda: torch.ones(4))
    _core.pause([make.tag])
    with checked():
        assert (resident + 1).sum() == 8
        for view in (paused[1:2], paused[3], paused.as_strided((2, 2), (1, 2)), paused.view(2, 2).t()):
            with pytest.raises(StateError):
                view + 1


@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_parts_are_seen(make):
    dense = torch.eye(3)
    for build in (dense.to_sparse, dense.to_sparse_csr, dense.to_sparse_csc):
        tensor = make(build)
        _core.pause([make.tag])
        with checked(), pytest.raises(StateError, match="is paused"):
            tensor @ torch.ones(3, 1)
        _core.resume([make.tag])


def test_backward_is_checked(make):
    weight = make(lambda: torch.ones(4, 4, requires_grad=True))
    loss = (torch.ones(2, 4, requires_grad=True) @ weight).sum()
    _core.pause([make.tag])
    with checked(), pytest.raises(StateError, match="mm"):
        loss.backward()


def test_enabling_twice_is_once(paused):
    with checked():
        ops.enable()
        assert torch._C._len_torch_dispatch_stack() == 1
        with pytest.raises(StateError):
            paused.sum()
    assert torch._C._len_torch_dispatch_stack() == 0


class _Counter(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


def test_it_lives_below_other_modes(paused):
    with _Counter() as counter:
        ops.enable()
        torch.ones(3)
        with pytest.raises(StateError):
            paused.sum()
    assert counter.calls >= 2
    calls = counter.calls
    with pytest.raises(StateError):
        paused.sum()
    assert counter.calls == calls, "the other mode ended, ours did not"
    with _Counter():
        end()
        torch.ones(3)
    assert torch._C._len_torch_dispatch_stack() == 0


def test_each_thread_asks_for_itself(paused):
    seen = []

    def work() -> None:
        seen.append(getattr(ops._thread, "mode", None))
        ops.enable()
        try:
            paused.sum()
        except StateError as error:
            seen.append(type(error))

    with checked():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    gc.collect()
    assert seen == [None, StateError]


@pytest.mark.parametrize("value, asked", [("1", True), ("0", False), ("", False), (None, False)])
def test_the_variable_asks(value, asked, monkeypatch):
    monkeypatch.delenv("EBBTIDE_CHECK", raising=False)
    if value is not None:
        monkeypatch.setenv("EBBTIDE_CHECK", value)
    assert enabling.are_asked_for() is asked

    def work() -> None:
        enabling.enable_if_asked()
        assert (getattr(ops._thread, "mode", None) is not None) is asked

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_training_under_check_gives_the_same_numbers():
    def train() -> list[float]:
        torch.manual_seed(1)
        model = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        optimizer = torch.optim.AdamW(model.parameters())
        losses = []
        for _ in range(5):
            loss = model(torch.randn(2, 5, 16)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    expected = train()
    with checked():
        assert train() == expected


class _Plain(torch.Tensor):
    pass


def _export():
    return torch.export.export(torch.nn.Linear(3, 3), (torch.ones(1, 3),))


def _make_fake():
    with FakeTensorMode():
        assert type(torch.ones(3) + 1) is FakeTensor


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested", "ignore:torch.quantize")
@pytest.mark.parametrize(
    "use",
    [
        _export,
        _make_fake,
        lambda: make_fx(lambda x: x.sin() * 2)(torch.ones(3)),
        lambda: torch.func.vmap(lambda x: x.sin() * 2)(torch.ones(3, 4)),
        lambda: torch.func.grad(lambda x: x.sin().sum())(torch.ones(3, 4)),
        lambda: torch.compile(lambda x: x.sin() * 2, backend="eager")(torch.ones(3)),
        lambda: checkpoint(torch.sin, torch.ones(3, requires_grad=True), use_reentrant=False).sum().backward(),
        lambda: torch.nested.nested_tensor([torch.ones(3), torch.ones(2)], layout=torch.jagged) + 1,
        lambda: torch.nested.nested_tensor([torch.ones(3), torch.ones(2)]) + 1,
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8).dequantize(),
        lambda: torch.ones(3).as_subclass(_Plain) + 1,
        lambda: copy.deepcopy(torch.nn.Linear(3, 3)),
        lambda: torch.fft.fft(torch.ones(8)).conj().real.sum().item(),
        lambda: torch.empty(3, device="meta") + 1,
    ],
)
def test_torchs_own_machinery_works_under_it(use):
    with checked():
        use()


def test_subclasses_are_looked_into(paused):
    jagged = torch.nested.nested_tensor_from_jagged(paused, torch.tensor([0, 1, 3]))
    for tensor in (paused.as_subclass(_Plain), jagged):
        with checked(), pytest.raises(StateError, match="is paused"):
            tensor * 2
