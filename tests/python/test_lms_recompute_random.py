"""Random models: whatever a trial accepts is recomputed, and three steps have the bits of plain ones."""

import contextlib
import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from ebbtide.lms.recompute.module_states import Subtree  # noqa: E402
from ebbtide.lms.recompute.objections import call_objection, may_decide, module_objection  # noqa: E402
from ebbtide.lms.recompute.structures import Structure  # noqa: E402
from ebbtide.lms.recompute.trials import try_out  # noqa: E402
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from recompute_models import WIDTH, assert_equal, handled, run_with  # noqa: E402
from torch import nn  # noqa: E402


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Any) -> Any:
        q, k, v = (one.reshape(*x.shape[:2], 2, -1).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        dropout = 0.1 if self.training else 0.0
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        return mixed.transpose(1, 2).reshape(x.shape)


class Counting(nn.Module):
    """Scales by how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        return x * (1 + self.calls / 8)


class Noise(nn.Module):
    """From a generator of its own, which a copy of the module can't share."""

    def __init__(self) -> None:
        super().__init__()
        self.seed = 5

    def forward(self, x: Any) -> Any:
        return x + 0.01 * torch.randn(x.shape, generator=torch.Generator().manual_seed(self.seed))


class AcrossTokens(nn.BatchNorm1d):
    def __init__(self) -> None:
        super().__init__(WIDTH)

    def forward(self, x: Any) -> Any:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class Residual(nn.Module):
    """What is recomputed or not. `scale` may be a tensor in a dict."""

    def __init__(self, parts: list[Any], index: int) -> None:
        super().__init__()
        self.parts, self.index = nn.ModuleList(parts), index

    def forward(self, x: Any, options: Any = None) -> Any:
        y = x
        for part in self.parts:
            y = part(y)
        return x + (y if options is None else y * options["scale"])


PARTS = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "norm": lambda: nn.LayerNorm(WIDTH),
    "gelu": nn.GELU,
    "relu": lambda: nn.ReLU(inplace=True),
    "dropout": lambda: nn.Dropout(0.3),
    "attention": Attention,
    "batch norm": AcrossTokens,
    "counting": Counting,
    "noise": Noise,
    "rms": lambda: nn.RMSNorm(WIDTH),
    "silu": nn.SiLU,
}


class Model(nn.Module):
    def __init__(self, blocks: list[list[str]], repeats: int, passes_options: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            Residual([nn.LayerNorm(WIDTH), *(PARTS[name]() for name in names)], index)
            for index, names in enumerate(blocks)
        )
        self.head = nn.Linear(WIDTH, 3)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.7))
        self.repeats, self.passes_options = repeats, passes_options

    def forward(self, x: Any) -> Any:
        for _ in range(self.repeats):
            for block in self.blocks:
                x = block(x, options={"scale": self.scale}) if self.passes_options else block(x)
        return self.head(x)


class Planner:
    """Tries each block out at its first call, and recomputes those that it wants and that the trial accepts."""

    def __init__(self, wanted: list[bool]) -> None:
        self.wanted = wanted
        self.objections: dict[int, str] = {}
        self.runs = 0

    def __call__(self, original: Any, module: Any, arguments: Any, options: Any) -> Any:
        if not isinstance(module, Residual) or not may_decide() or not self.wanted[module.index]:
            return original(module, *arguments, **options)
        subtree = Subtree(module)
        said = module_objection(subtree) or call_objection(subtree, Structure(arguments, options, module))
        if not said and module.index not in self.objections:
            result, self.objections[module.index] = try_out(original, module, arguments, options)
            return result
        if said or self.objections[module.index]:
            return original(module, *arguments, **options)
        return run_with(original, module, arguments, options, self.second_run)

    @contextlib.contextmanager
    def second_run(self) -> Any:
        self.runs += 1
        yield


def train(model: Any, autocasts: bool, accumulates: bool) -> list[Any]:
    """Losses, gradients and weights of three steps, and the random numbers that come next."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    found: list[Any] = []
    for _ in range(3):
        for _ in range(1 + accumulates):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocasts):
                loss = model(torch.randn(2, 4, WIDTH)).float().square().mean()
            loss.backward()
            found.append(loss.detach())
        found += [one.grad.clone() for one in model.parameters() if one.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(one.detach() for one in model.parameters()), *model.buffers(), torch.rand(2)]


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    blocks=st.lists(st.lists(st.sampled_from(sorted(PARTS)), max_size=4), min_size=1, max_size=4),
    repeats=st.integers(1, 2),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    wanted=st.lists(st.booleans(), min_size=4, max_size=4),
    frozen=st.sets(st.integers(0, 3)),
)
def test_random_models(blocks: Any, repeats: int, flags: Any, wanted: Any, frozen: Any) -> None:
    passes_options, autocasts, accumulates = flags
    model = Model(blocks, repeats, passes_options)
    for index in frozen & set(range(len(blocks))):
        model.blocks[index].requires_grad_(False)
    plain = train(copy.deepcopy(model), autocasts, accumulates)
    with handled(Planner(wanted)) as planner:
        assert_equal(train(model, autocasts, accumulates), plain)
    for index, said in planner.objections.items():
        if not set(blocks[index]) & {"counting", "batch norm", "noise"}:
            assert said == "", blocks[index]
    if any(said == "" for said in planner.objections.values()):
        assert planner.runs >= 2


def test_such_a_model_is_recomputed() -> None:
    """So that the random test is seen to test something."""
    model = Model([["linear", "gelu", "dropout"], ["counting"], ["attention", "dropout"]], 1, True)
    plain = train(copy.deepcopy(model), True, False)
    with handled(Planner([True, True, True])) as planner:
        assert_equal(train(model, True, False), plain)
    assert planner.objections == {0: "", 1: "its forward changes the attribute parts.1.calls", 2: ""}
    assert planner.runs == 4
