"""What a program changes between a recomputed call and its backward: it raises, or the second run is spared of it."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")
from recompute_models import (  # noqa: E402
    CALL,
    WIDTH,
    Block,
    Linear,
    assert_equal,
    objection_to,
    recomputed,
    run,
)
from torch import nn  # noqa: E402


@pytest.fixture
def x() -> Any:
    torch.manual_seed(1)
    return torch.randn(2, 4, WIDTH)


class Adds(nn.Module):
    """Saves its weight, and nothing of its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Any) -> Any:
        return ((x + self.bias) * self.weight).sum()


def test_an_argument_that_is_changed_later_raises(x: Any) -> None:
    """A plain call works, as long as it did not save the argument."""

    def step(call: Any) -> None:
        argument = x.clone()
        loss = call(argument)
        argument.add_(1)
        loss.backward()

    step(Adds())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step(lambda argument: run(Adds(), argument))


@pytest.mark.parametrize("name", ["bias", "linear.weight", "buffer"])
def test_a_parameter_or_buffer_that_is_changed_later_raises(x: Any, name: str) -> None:
    module = Adds()
    module.linear = nn.Linear(1, 1)
    module.register_buffer("buffer", torch.zeros(1))
    loss = run(module, x)
    with torch.no_grad():
        {**dict(module.named_parameters()), **dict(module.named_buffers())}[name].add_(1)
    with pytest.raises(RuntimeError, match=f"^{name} of Adds was changed in place .* recompute=False"):
        loss.backward()


def changes() -> dict[str, Any]:
    return {
        "eval": (lambda block: block.eval()),
        "frozen": (lambda block: block.mlp.requires_grad_(False)),
        "replaced": (lambda block: setattr(block.out, "weight", nn.Parameter(torch.zeros(WIDTH, WIDTH)))),
        "attribute": (lambda block: setattr(block.drop, "p", 0.9)),
        "object": (lambda block: setattr(block.options, "scale", 2.0)),
        "dict in an object": (lambda block: block.options.scales.update(adapter=2.0)),
        "dict": (lambda block: block.scales.update(adapter=2.0, other=3.0)),
        "list": (lambda block: block.factors.insert(0, 2.0)),
        "set": (lambda block: block.names.add("c")),
        "module": (lambda block: setattr(block, "mlp", nn.Identity())),
        "deleted": (lambda block: delattr(block, "mlp")),
        "added": (lambda block: setattr(block, "more", 1)),
        "precision": (lambda block: torch.set_float32_matmul_precision("medium")),
        "deterministic": (lambda block: torch.use_deterministic_algorithms(True, warn_only=True)),
        "dtype": (lambda block: torch.set_default_dtype(torch.float64)),
        "attention": (lambda block: torch.backends.cuda.enable_math_sdp(False)),
    }


@pytest.fixture
def settings() -> Any:
    yield
    torch.set_float32_matmul_precision("highest")
    torch.use_deterministic_algorithms(False)
    torch.set_default_dtype(torch.float32)
    torch.backends.cuda.enable_math_sdp(True)


class Options:
    """What a program keeps beside its modules."""

    def __init__(self) -> None:
        self.scale, self.scales = 0.5, {"adapter": 0.5}


class Made(Block):
    """Its results depend on settings that a checkpoint does not restore, and on what its attributes contain."""

    def __init__(self) -> None:
        super().__init__()
        self.options, self.scales, self.factors, self.names = Options(), {"adapter": 0.5}, [0.5], {"a", "b"}

    def forward(self, x: Any, mask: Any = None) -> Any:
        x = x * (self.options.scale + self.options.scales["adapter"] + self.scales["adapter"] + self.factors[0])
        x = x * len(self.names)
        settings = [
            torch.get_default_dtype() == torch.float32,
            torch.get_float32_matmul_precision() == "highest",
            not torch.are_deterministic_algorithms_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
        ]
        return super().forward(x) * torch.tensor(settings, dtype=x.dtype).sum().sin()


@pytest.mark.parametrize("name", changes())
def test_the_second_run_finds_things_as_the_first_did(name: str, x: Any, settings: Any) -> None:
    def gradients(call: Any) -> list[Any]:
        torch.manual_seed(2)
        module = Made()
        parameters = list(module.parameters())
        loss = call(module, x).sum()
        changes()[name](module)
        held = [str((vars(module.options), module.scales, module.factors, sorted(module.names)))]
        found = [vars(one).copy() for one in module.modules()], torch.get_default_dtype()
        gradients = torch.autograd.grad(loss, [one for one in parameters if one.requires_grad])
        assert ([vars(one) for one in module.modules()], torch.get_default_dtype()) == found
        assert held == [str((vars(module.options), module.scales, module.factors, sorted(module.names)))]
        return [gradient.float() for gradient in gradients]

    plain = gradients(CALL)
    torch.set_float32_matmul_precision("highest")
    torch.use_deterministic_algorithms(False)
    torch.set_default_dtype(torch.float32)
    torch.backends.cuda.enable_math_sdp(True)
    assert_equal(gradients(run), plain)


class Between(nn.Linear):
    """Its second run ends with the last tensor that it saves, before it puts back what it has changed."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.is_running, self.scales, self.frozen = False, {"own": 1.0}, nn.Parameter(torch.ones(1))

    def forward(self, x: Any) -> Any:
        self.is_running, self.scales["own"] = True, 2.0
        self.more = torch.set_float32_matmul_precision("medium")
        self.frozen.requires_grad_(False)
        y = super().forward(x).sin()
        self.frozen.requires_grad_(True)
        torch.set_float32_matmul_precision("highest")
        self.is_running, self.scales["own"] = False, 1.0
        del self.more
        return y


@pytest.mark.parametrize("is_changed", [False, True])
def test_a_second_run_that_ends_early_leaves_things_as_they_were(x: Any, settings: Any, is_changed: bool) -> None:
    module = Between()
    loss = run(module, x).sum()
    if is_changed:
        module.other, module.scales["other"] = 1, 3.0
        torch.backends.cuda.enable_math_sdp(False)
    found = vars(module).copy(), module.scales.copy(), torch.backends.cuda.math_sdp_enabled()
    loss.backward()
    assert (vars(module), module.scales, torch.backends.cuda.math_sdp_enabled()) == found
    assert torch.get_float32_matmul_precision() == "highest" and module.frozen.requires_grad


def test_a_trial_that_is_stopped_leaves_things_as_they_were(x: Any, settings: Any) -> None:
    class Differs(Between):
        runs = 0

        def forward(self, x: Any) -> Any:
            type(self).runs += 1
            return super().forward(x * self.runs)

    module = Differs()
    assert objection_to(module, x) != ""
    assert torch.get_float32_matmul_precision() == "highest" and module.frozen.requires_grad


def test_modules_are_called_in_the_order_of_the_first_run(x: Any) -> None:
    def gradients(call: Any) -> list[Any]:
        torch.manual_seed(2)
        module = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))
        parameters = list(module.parameters())
        loss = call(module, x).sum()
        first = module[0]
        del module[0]
        module.append(first)
        return list(torch.autograd.grad(loss, parameters))

    assert_equal(gradients(run), gradients(CALL))


def test_a_container_that_is_met_in_another_one_first_is_looked_at(x: Any) -> None:
    class Appends(Linear):
        def __init__(self) -> None:
            super().__init__()
            self.options = Options()
            self.all, self.own = [self.options], self.options
            del self.options

        def forward(self, x: Any) -> Any:
            self.own.scales[str(len(self.own.scales))] = 1.0
            return self.plain(x)

    assert objection_to(Appends(), x) == "its forward changes what own.scales contains"


class TakesAway(Linear):
    def forward(self, x: Any) -> Any:
        vars(self).pop("history", None)
        return self.plain(x)


class ReplacesInside(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.inner: nn.Module = Linear()

    def forward(self, x: Any) -> Any:
        self.inner = nn.Identity()
        return self.plain(x)


@pytest.mark.parametrize(("kind", "name"), [(TakesAway, "history"), (ReplacesInside, "inner")])
def test_a_trial_names_what_is_gone(x: Any, kind: type, name: str) -> None:
    assert objection_to(kind(), x) == f"its forward changes the attribute {name}"


def test_what_was_written_has_its_path_though_its_module_was_replaced(x: Any) -> None:
    block = Block()
    loss = run(block, x).sum()
    with torch.no_grad():
        block.mlp[0].weight.mul_(2)
    block.mlp = nn.Identity()
    with pytest.raises(RuntimeError, match=r"^mlp\.0\.weight of Block was changed in place"):
        loss.backward()


def test_functional_call(x: Any) -> None:
    """Its weights are in the module for the length of the call alone."""
    block = Block().eval()
    weights = {name: weight.detach().clone().requires_grad_() for name, weight in block.named_parameters()}
    scaled = {name: weight * 0.5 for name, weight in weights.items()}
    expected = torch.autograd.grad(torch.func.functional_call(block, scaled, (x,)).sum(), weights.values())
    scaled = {name: weight * 0.5 for name, weight in weights.items()}
    with recomputed(Block) as runs:
        loss = torch.func.functional_call(block, scaled, (x,)).sum()
        assert_equal(list(torch.autograd.grad(loss, weights.values())), list(expected))
    assert runs.count == 1


def test_the_default_device_holds_in_the_second_run() -> None:
    class Makes(nn.Linear):
        def forward(self, x: Any) -> Any:
            return super().forward(x) * torch.ones(2).sin()

    module, leaf = Makes(2, 2), torch.ones(2)
    with torch.device("cpu"), recomputed(Makes) as runs:
        loss = module(leaf).sum()
    loss.backward()
    assert runs.count == 1
