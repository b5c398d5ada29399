"""A trial finds what forbids to recompute a call, and leaves things as one run does."""

from collections import deque
from typing import Any, ClassVar

import pytest

torch = pytest.importorskip("torch")
from ebbtide.lms.recompute.objections import may_decide  # noqa: E402
from ebbtide.lms.recompute.trials import try_out  # noqa: E402
from recompute_models import (  # noqa: E402
    CALL,
    WIDTH,
    Block,
    Linear,
    OwnGenerator,
    assert_equal,
    handled,
    objection_to,
    results_of,
)
from torch import nn  # noqa: E402


@pytest.fixture
def x() -> Any:
    torch.manual_seed(1)
    return torch.randn(2, 4, WIDTH)


class Trials:
    """A handler that tries out each call of one class."""

    def __init__(self, kind: type) -> None:
        self.said: list[str] = []
        self._kind = kind

    def __call__(self, original: Any, module: Any, arguments: Any, options: Any) -> Any:
        if not isinstance(module, self._kind) or not may_decide():
            return original(module, *arguments, **options)
        result, objection = try_out(original, module, arguments, options)
        self.said.append(objection)
        return result


def test_a_step_of_trials_is_a_plain_one(x: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 1))

    def step(model: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x).float().sum()

    plain = results_of(model, step)
    with handled(Trials(Block)) as trials:
        assert_equal(results_of(model, step), plain)
    assert trials.said == ["", ""]


def test_saved_tensors_go_through_the_hooks_outside(x: Any) -> None:
    """As they do in a plain call, and those of the arguments once more."""
    block = Block().eval()
    x.requires_grad_()

    def packed(call: Any) -> set[tuple[int, ...]]:
        seen: list[Any] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda one: seen.append(one) or one, lambda one: one):
            call().sum().backward()
        return {tuple(one.shape) for one in seen}

    assert packed(lambda: try_out(CALL, block, (x,), {})[0]) == packed(lambda: block(x))


def test_torch_still_checks_versions(x: Any) -> None:
    """Hooks would switch that check off."""
    weight = nn.Linear(WIDTH, WIDTH)
    y = x.clone().requires_grad_()
    hidden = y * 1
    result, objection = try_out(CALL, weight, (hidden,), {})
    with torch.no_grad():
        hidden.add_(1)
    assert objection == ""
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


def test_double_backward_and_retained_graphs(x: Any) -> None:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    x.requires_grad_()

    def gradients(result: Any) -> list[Any]:
        (gradient,) = torch.autograd.grad(result.sum(), x, create_graph=True)
        return [
            gradient,
            *torch.autograd.grad(gradient.square().sum(), list(module.parameters())[:1], retain_graph=True),
        ]

    plain, tried = module(x), try_out(CALL, module, (x,), {})[0]
    assert_equal(gradients(tried), gradients(plain))
    assert_equal(gradients(tried), gradients(plain))


def test_an_exception_of_the_first_run_is_the_programs(x: Any) -> None:
    class Fails(nn.Linear):
        def forward(self, x: Any) -> Any:
            raise ValueError("first")

    with pytest.raises(ValueError, match="first"):
        try_out(CALL, Fails(WIDTH, 2), (x,), {})
    assert may_decide()


class Global(Linear):
    """Changes what no look at the module tells: `kinds` has the results of the calls, in turn."""

    kinds: ClassVar[deque[str]] = deque()

    def forward(self, x: Any) -> Any:
        kind = Global.kinds.popleft()
        if kind == "raise":
            raise KeyError("second")
        if kind == "more":
            return self.plain(x).sin()
        if kind == "shape":
            return self.plain(x)[:1].clone()
        if kind == "dtype":
            return self.plain(x).double().sin()
        if kind == "bits":
            return self.plain(x + 1)
        if kind == "output":
            return self.plain(x) + 1
        if kind == "several":
            return self.plain(x), x
        return self.plain(x)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("", "", ""),
        ("", "raise", "its second run raised KeyError: 'second'"),
        ("", "more", "its second run saves more tensors"),
        ("more", "", "its second run saves fewer tensors"),
        ("", "shape", "its second run returns another tensor: shape"),
        ("", "output", "its second run returns another tensor: bits"),
        ("", "bits", "its second run saves another tensor: bits of number 0"),
        ("more", "dtype", "its second run saves another tensor: dtype of number 2"),
        ("", "several", "its second run returns other tensors"),
    ],
)
def test_differences_of_the_second_run(x: Any, first: str, second: str, expected: str) -> None:
    Global.kinds = deque([first, second])
    module = Global()
    result, objection = try_out(CALL, module, (x,), {})
    assert objection == expected and not Global.kinds
    Global.kinds = deque([first])
    assert torch.equal(result, module(x))


def test_random_numbers_after_a_second_run_that_ends_in_the_middle(x: Any) -> None:
    class Draws(Global):
        def forward(self, x: Any) -> Any:
            return nn.functional.dropout(super().forward(nn.functional.dropout(x)))

    Global.kinds = deque(["", "raise", ""])
    torch.manual_seed(3)
    assert "KeyError" in objection_to(Draws(), x)
    state = torch.get_rng_state()
    torch.manual_seed(3)
    Draws()(x)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_module_that_catches_the_signal(x: Any) -> None:
    class Catches(Linear):
        def forward(self, x: Any) -> Any:
            try:
                return self.plain(x) * torch.rand(WIDTH, generator=OwnGenerator.source)
            except Exception:
                return self.plain(x)

    assert objection_to(Catches(), x) == "it draws random numbers from a generator of its own"


def test_a_backward_in_forward(x: Any) -> None:
    class Differentiates(Linear):
        def forward(self, x: Any) -> Any:
            y = self.plain(x)
            (gradient,) = torch.autograd.grad(y.sum(), self.weight, create_graph=True)
            return y * gradient.sum()

    module = Differentiates()
    result, objection = try_out(CALL, module, (x,), {})
    assert objection == "it runs a backward in its forward"
    assert torch.equal(result, module(x))


def test_nothing_saved(x: Any) -> None:
    class Adds(Linear):
        def forward(self, x: Any) -> Any:
            return x + self.bias

    assert objection_to(Adds(), x) == "it saves nothing for backward"


def test_an_unknown_argument(x: Any) -> None:
    class Ignores(Linear):
        def forward(self, x: Any, cache: Any) -> Any:
            return self.plain(x)

    assert objection_to(Ignores(), x, cache=object()) == "its argument cache is or holds a object"


def test_attributes_after_a_second_run_that_ends_in_the_middle(x: Any) -> None:
    class Sets(Linear):
        def forward(self, x: Any) -> Any:
            self.calls = 1
            y = self.plain(x) * torch.rand(WIDTH, generator=OwnGenerator.source)
            self.calls = 0
            return y

    module = Sets()
    assert objection_to(module, x) == "it draws random numbers from a generator of its own"
    assert module.calls == 0


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_modules(x: Any, backend: str) -> None:
    torch._dynamo.reset()
    block, whole = Block().eval(), torch.compile(Block().eval(), backend=backend)
    block.compile(backend=backend)
    assert objection_to(block, x) == "" and objection_to(whole, x) == ""
    block.train()
    assert objection_to(block, x) == ""


def test_a_compiled_function_stays_compiled(x: Any) -> None:
    """No look at the module tells it, and uncompiled it may round otherwise."""
    torch._dynamo.reset()
    runs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        def compiled(*arguments: Any) -> Any:
            runs.append(1)
            return graph(*arguments)

        return compiled

    function = torch.compile(lambda x: x.sin().cos(), backend=backend)

    class Calls(Linear):
        def forward(self, x: Any) -> Any:
            return function(self.plain(x))

    assert objection_to(Calls(), x) == ""
    assert len(runs) == 2


@pytest.mark.parametrize(("size", "objection"), [(1, ""), (2, ""), (3, "another tensor: bits")])
def test_an_unset_state_of_random_numbers_may_differ(x: Any, size: int, objection: str) -> None:
    """As attention on a GPU saves it where it drops nothing."""
    numbers = iter(range(100))

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, given: Any) -> Any:
            ctx.save_for_backward(given, torch.full((size,), next(numbers)))
            return given * 2

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            return gradient * 2

    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(WIDTH, WIDTH)

        def forward(self, given: Any) -> Any:
            return Function.apply(self.project(given))

    with handled(Trials(Attending)) as trials:
        Attending()(x).sum().backward()
    assert objection in trials.said[0] and bool(objection) == bool(trials.said[0])
