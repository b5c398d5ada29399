"""torch works as before while a function of ours stands in place of `torch.nn.Module.__call__`."""

import copy
import io
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from ebbtide.lms.recompute.module_calls import ModuleCalls  # noqa: E402
from torch import nn  # noqa: E402


class Counter:
    """A handler that passes each call on."""

    def __init__(self) -> None:
        self.modules: list[Any] = []

    def __call__(self, original: Any, module: Any, arguments: Any, options: Any) -> Any:
        if not isinstance(module, torch.fx.GraphModule):  # what compiled code calls
            self.modules.append(module)
        return original(module, *arguments, **options)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return x + scale * self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class OwnCall(Block):
    """As transformers' GradientCheckpointingLayer had it."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return super().__call__(*arguments, **options)


class Breaks(Block):
    """Its forward can't be compiled as a whole."""

    def forward(self, x: Any, scale: float = 1.0) -> Any:
        torch._dynamo.graph_break()
        return super().forward(x, scale)


@pytest.fixture
def handler() -> Iterator[Counter]:
    plain = nn.Module.__call__
    counter = Counter()
    calls = ModuleCalls(counter)
    calls.replace()
    yield counter
    calls.restore()
    assert nn.Module.__call__ is plain


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(Block(), OwnCall())


X = torch.linspace(-1, 1, 12).reshape(3, 4)


def plain(module: Any, *arguments: Any) -> Any:
    """What it returns without any of our functions."""
    return nn.Module._call_impl(module, *arguments)


def test_every_call_is_seen(handler: Counter, model: Any) -> None:
    assert torch.equal(model(X), plain(model, X))
    assert handler.modules[:3] == [model, model[0], model[0].norm]
    assert handler.modules.count(model[1]) == 2  # once by `plain`


def test_restoring_ends_it(model: Any) -> None:
    before, counter = nn.Module.__call__, Counter()
    calls = ModuleCalls(counter)
    calls.replace()
    calls.restore()
    calls.restore()
    model(X)
    assert nn.Module.__call__ is before and counter.modules == []


def test_what_wraps_ours_stays(model: Any) -> None:
    before, counter = nn.Module.__call__, Counter()
    calls = ModuleCalls(counter)
    calls.replace()
    ours = nn.Module.__call__

    def other(self: Any, *arguments: Any, **options: Any) -> Any:
        return ours(self, *arguments, **options)

    nn.Module.__call__ = other
    try:
        calls.restore()
        assert nn.Module.__call__ is other
        assert torch.equal(model(X), plain(model, X)) and counter.modules == []
        again = Counter()
        second = ModuleCalls(again)
        second.replace()
        model(X)
        second.restore()
        assert again.modules[0] is model and nn.Module.__call__ is other
    finally:
        nn.Module.__call__ = before


def test_copies_and_files(handler: Counter, model: Any) -> None:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
        assert torch.equal(copied(X), model(X))
        assert copied in handler.modules


@pytest.mark.parametrize(("backend", "is_imported_before"), [("eager", True), ("aot_eager", False)])
def test_a_compiled_model_is_one_graph(model: Any, backend: str, is_imported_before: bool) -> None:
    """Dynamo compares with the `__call__` that it found as it was imported."""
    import torch._dynamo
    from torch._dynamo.variables import nn_module

    torch._dynamo.reset()
    before, known = nn.Module.__call__, nn_module.unpatched_nn_module_call
    counter = Counter()
    calls = ModuleCalls(counter)
    calls.replace()
    try:
        if not is_imported_before:
            nn_module.unpatched_nn_module_call = nn.Module.__call__
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        x = X.clone().requires_grad_()
        result = compiled(x)
        assert torch.allclose(result, plain(model, X))
        result.sum().backward()
        assert x.grad is not None
        assert counter.modules[0] is compiled  # decided outside of compiled code
        inside = counter.modules[1:]
        compiled(x)
        assert counter.modules[len(inside) + 1 :] == [compiled]
        graphs = torch._dynamo.explain(model)(X).graph_count
    finally:
        calls.restore()
        nn_module.unpatched_nn_module_call = known
    assert graphs == 1 and nn.Module.__call__ is before
    assert torch.allclose(compiled(X), plain(model, X))


def test_a_module_that_compiles_itself(handler: Counter, model: Any) -> None:
    torch._dynamo.reset()
    for block in model:
        block.compile(backend="aot_eager", fullgraph=True)
    assert torch.allclose(model(X), nn.Sequential(*copy.deepcopy(list(model)))(X))
    handler.modules.clear()
    model(X)
    assert handler.modules == [model, model[0], model[1]]


@pytest.mark.parametrize("kind", [Block, Breaks])
def test_as_many_graphs_and_recompilations_as_without(kind: type, model: Any) -> None:
    from torch._dynamo.testing import CompileCounter

    def count() -> tuple[int, int]:
        torch._dynamo.reset()
        counter = CompileCounter()
        compiled = torch.compile(nn.Sequential(kind(), nn.Linear(4, 4), kind()), backend=counter)
        for _ in range(3):
            compiled(X)
        return counter.frame_count, counter.op_count

    without = count()
    calls = ModuleCalls(Counter())
    calls.replace()
    try:
        assert count() == without
    finally:
        calls.restore()


def test_a_hook_that_breaks_the_graph_stays_outside(handler: Counter, model: Any) -> None:
    torch._dynamo.reset()
    seen: list[Any] = []
    model[0].register_forward_hook(torch.compiler.disable(lambda module, inputs, output: seen.append(output)))
    torch.compile(model[0], backend="eager", fullgraph=True)(X)
    assert len(seen) == 1


def test_disabled_code_in_compiled_code(handler: Counter, model: Any) -> None:
    torch._dynamo.reset()
    inner = Block()

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        @torch.compiler.disable
        def eager(self, x: Any) -> Any:
            return self.inner(x)

        def forward(self, x: Any) -> Any:
            return self.eager(x * 2) + 1

    assert torch.allclose(torch.compile(Outer(), backend="eager")(X), plain(inner, X * 2) + 1)
    assert inner in handler.modules


def test_torchscript_and_tracing(handler: Counter) -> None:
    block = Block()
    expected = block(X)
    scripted, traced = torch.jit.script(block), torch.jit.trace(block, (X,))
    assert torch.allclose(scripted(X), expected) and torch.allclose(traced(X), expected)
    assert scripted in handler.modules


def test_fx_traces_through_it(handler: Counter, model: Any) -> None:
    ours = nn.Module.__call__
    traced = torch.fx.symbolic_trace(nn.Sequential(Block(), Block()))
    assert handler.modules == []
    assert nn.Module.__call__ is ours
    assert {node.target for node in traced.graph.nodes if node.op == "call_module"} >= {"0.norm", "1.up"}
    assert traced(X).shape == X.shape
    assert handler.modules[0] is getattr(traced, "0").norm


def test_restoring_in_a_trace_of_fx(model: Any) -> None:
    before, counter = nn.Module.__call__, Counter()
    calls = ModuleCalls(counter)
    calls.replace()

    class Restores(nn.Module):
        def forward(self, x: Any) -> Any:
            calls.restore()
            return x + 1

    torch.fx.Tracer().trace(Restores())
    try:
        model(X)
        assert counter.modules == []  # fx has put ours back, which passes calls on
    finally:
        nn.Module.__call__ = before


@pytest.mark.parametrize("is_strict", [True, False])
def test_export(handler: Counter, is_strict: bool) -> None:
    torch._dynamo.reset()
    block = Block()
    exported = torch.export.export(block, (X,), strict=is_strict)
    assert torch.allclose(exported.module()(X), plain(block, X))


def test_transforms(handler: Counter) -> None:
    block = Block()
    weights = dict(block.named_parameters())

    def loss(weights: Any, x: Any) -> Any:
        return torch.func.functional_call(block, weights, (x,)).sum()

    expected = torch.autograd.grad(block(X).sum(), weights.values())
    assert all(map(torch.allclose, torch.func.grad(loss)(weights, X).values(), expected))
    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, X)
    assert all(torch.allclose(one.sum(0), whole, atol=1e-6) for one, whole in zip(each.values(), expected, strict=True))


def test_an_interrupt_leaves_nothing(handler: Counter) -> None:
    class Interrupted(nn.Module):
        def forward(self, x: Any) -> Any:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Interrupted()(X)
    block = Block()
    assert torch.equal(block(X), plain(block, X))


def test_threads(handler: Counter, model: Any) -> None:
    results: list[Any] = []
    threads = [threading.Thread(target=lambda: results.append(model(X).detach())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(result, plain(model, X)) for result in results) and len(results) == 4


def test_distributed_data_parallel(handler: Counter, model: Any, one_rank: None) -> None:
    wrapped = nn.parallel.DistributedDataParallel(model)
    wrapped(X).sum().backward()
    assert handler.modules[:2] == [wrapped, model]
    assert all(parameter.grad is not None for parameter in model.parameters())
