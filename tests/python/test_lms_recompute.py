"""A call whose saved tensors are made again in backward has the results and random numbers of a plain one."""

import contextlib
import gc
import weakref
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from recompute_models import CALL, WIDTH, Block, assert_equal, compare, recomputed, run, run_with  # noqa: E402
from torch import nn  # noqa: E402


@pytest.fixture
def x() -> Any:
    torch.manual_seed(1)
    return torch.randn(2, 4, WIDTH)


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 1))


def test_dropout(model: Any, x: Any) -> None:
    assert compare(model, lambda model: model(x).sum()) == 2


def test_autocast(model: Any, x: Any) -> None:
    def step(model: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x).float().sum()

    assert compare(model, step) == 2


def test_nothing_that_a_block_saves_is_kept(model: Any, x: Any) -> None:
    """What hooks outside see is the input alone."""
    seen: list[Any] = []
    x.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: seen.append(tensor) or tensor, lambda tensor: tensor):
        run(model[0], x).sum().backward()
    assert [tensor.data_ptr() for tensor in seen if tensor.numel()] == [x.data_ptr()]  # and an empty one before 2.13


def test_tied_weights_and_a_block_that_is_called_often(x: Any) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.block, self.head = nn.Embedding(5, WIDTH), Block(), nn.Linear(WIDTH, 5, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens: Any) -> Any:
            x = self.embed(tokens)
            for _ in range(3):
                x = self.block(x)
            return self.head(x)

    tokens = torch.tensor([[1, 2, 3, 4]])
    assert compare(Tied(), lambda model: model(tokens).logsumexp(-1).sum(), (Block, nn.Linear)) == 4


def test_of_nested_candidates_the_outermost_is_recomputed(model: Any, x: Any) -> None:
    assert compare(model, lambda model: model(x).sum(), (nn.Sequential, Block, nn.Linear)) == 1


def test_frozen_parameters(model: Any, x: Any) -> None:
    model[0].requires_grad_(False)
    model[1].mlp.requires_grad_(False)
    assert compare(model, lambda model: model(x).sum()) == 1  # the first block saves nothing


def test_arguments_that_need_a_gradient_and_some_that_do_not(model: Any, x: Any) -> None:
    leaf, mask = x.clone().requires_grad_(), torch.zeros(4, 4)

    def step(model: Any) -> Any:
        leaf.grad = None
        return model[1](model[0](leaf * 2, mask=mask), mask).sum()

    assert compare(model, step) == 2
    assert leaf.grad is not None and mask.grad is None


def test_gradients_of_inputs(model: Any, x: Any) -> None:
    leaf = x.clone().requires_grad_()
    model.eval()
    (expected,) = torch.autograd.grad(model(leaf).sum(), leaf)
    with recomputed(Block) as runs:
        (part,) = torch.autograd.grad(model(leaf).sum(), leaf)
        assert torch.equal(part, expected) and runs.count == 2
        hidden = model[0](leaf)
        torch.autograd.grad(model[1](hidden).sum(), hidden)
        assert runs.count == 3  # of the second block alone


def test_double_backward(model: Any, x: Any) -> None:
    leaf = x.clone().requires_grad_()

    class Smooth(nn.Sequential):
        pass

    smooth = nn.Sequential(Smooth(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.GELU()))

    def penalty(model: Any) -> Any:
        (gradient,) = torch.autograd.grad(model(leaf).sum(), leaf, create_graph=True)
        return gradient.square().sum()

    assert compare(smooth, penalty, Smooth) == 2


def test_backward_twice(model: Any, x: Any) -> None:
    def twice() -> list[Any]:
        torch.manual_seed(3)
        model.zero_grad()
        loss = model(x).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    plain = twice()
    with recomputed(Block) as runs:
        assert_equal(twice(), plain)
    assert runs.count == 4


def test_the_generator_after_backward_is_the_one_before(model: Any, x: Any) -> None:
    with recomputed(Block):
        loss = model(x).sum()
        state = torch.get_rng_state()
        loss.backward()
    assert torch.equal(torch.get_rng_state(), state)


class Fails(Block):
    fails = True

    def forward(self, x: Any, mask: Any = None) -> Any:
        y = super().forward(x)
        if self.fails:
            raise ValueError("forward")
        return y.sin().sin()


def test_an_exception_in_forward(model: Any, x: Any) -> None:
    with recomputed(Block):
        with pytest.raises(ValueError, match="forward"):
            Fails()(x)
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert compare(model, lambda model: model(x).sum()) == 2


def test_an_exception_in_the_second_run(x: Any) -> None:
    calls: list[int] = []

    class Once(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Any) -> Any:
            calls.append(1)
            if len(calls) == 2:
                raise KeyError("second")
            return self.linear(x).sin()

    module = Once()
    ends: list[str] = []

    @contextlib.contextmanager
    def second_run() -> Any:
        try:
            yield
        finally:
            ends.append("end")

    loss = run_with(CALL, module, (x,), {}, second_run).sum()
    with pytest.raises(KeyError):
        loss.backward()
    assert ends == ["end"] and torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    loss.backward()
    assert module.linear.weight.grad is not None


def test_what_a_dead_graph_held_is_released(model: Any, x: Any) -> None:
    y = x.clone()
    kept = weakref.ref(y)
    gc.disable()
    try:
        loss = run(model[0], y).sum()
        del y
        assert kept() is not None
        del loss
        assert kept() is None
    finally:
        gc.enable()


def test_a_compiled_block(model: Any, x: Any) -> None:
    torch._dynamo.reset()
    model[0].compile(backend="aot_eager")
    model[1].compile(backend="aot_eager")
    model.eval()
    assert compare(model, lambda model: nn.functional.silu(model(x)).sum()) == 2
