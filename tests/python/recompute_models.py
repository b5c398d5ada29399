"""Small modules whose calls are recomputed, and steps with and without."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from ebbtide.lms.recompute import second_runs  # noqa: E402
from ebbtide.lms.recompute.module_calls import ModuleCalls  # noqa: E402
from ebbtide.lms.recompute.module_states import Subtree  # noqa: E402
from ebbtide.lms.recompute.objections import may_decide  # noqa: E402
from ebbtide.lms.recompute.structures import Structure  # noqa: E402
from ebbtide.lms.recompute.trials import try_out  # noqa: E402
from torch import nn  # noqa: E402

WIDTH = 8
CALL = nn.Module.__call__


class Block(nn.Module):
    """One of a Transformer, with dropout."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Any, mask: Any = None) -> Any:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.drop(self.out(nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)))
        return x + self.drop(self.mlp(x))


def run_with(call: Any, module: Any, arguments: tuple[Any, ...], options: dict[str, Any], second_run: Any) -> Any:
    structure = Structure(arguments, options, module)
    return second_runs.run(call, Subtree(module), structure, arguments, options, second_run)


def run(module: Any, *arguments: Any, **options: Any) -> Any:
    """A recomputed call."""
    return run_with(CALL, module, arguments, options, contextlib.nullcontext)


class SecondRuns:
    """A handler of calls that recomputes those of one class."""

    def __init__(self, kind: type | tuple[type, ...]) -> None:
        self.count = 0
        self._kind = kind

    def __call__(self, original: Any, module: Any, arguments: Any, options: Any) -> Any:
        if isinstance(module, self._kind) and may_decide():
            return run_with(original, module, arguments, options, self.second_run)
        return original(module, *arguments, **options)

    @contextlib.contextmanager
    def second_run(self) -> Iterator[None]:
        self.count += 1
        yield


@contextlib.contextmanager
def handled(handler: Any) -> Iterator[Any]:
    calls = ModuleCalls(handler)
    calls.replace()
    try:
        yield handler
    finally:
        calls.restore()


def recomputed(kind: type | tuple[type, ...]) -> Any:
    """`with recomputed(Block) as runs`: each call of a Block is recomputed; `runs.count` counts second runs."""
    return handled(SecondRuns(kind))


def results_of(model: Any, step: Callable[[Any], Any]) -> list[Any]:
    """The loss, all gradients, and the random numbers that come next."""
    torch.manual_seed(7)
    model.zero_grad()
    loss = step(model)
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters()), torch.rand(3)]


def assert_equal(one: list[Any], other: list[Any]) -> None:
    """None, for a parameter without a gradient, equals None."""
    assert len(one) == len(other)
    for left, right in zip(one, other, strict=True):
        assert left is right is None or torch.equal(left, right)


def compare(model: Any, step: Callable[[Any], Any], kind: type | tuple[type, ...] = Block) -> int:
    """Asserts that a step with recomputed blocks has the results of one without; the number of second runs."""
    plain = results_of(model, step)
    with recomputed(kind) as runs:
        assert_equal(results_of(model, step), plain)
    return runs.count


def objection_to(module: Any, *arguments: Any, **options: Any) -> str:
    """What a trial says of this call."""
    return try_out(CALL, module, arguments, options)[1]


class Linear(nn.Linear):
    """What modules of single tests derive from."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.calls = 0
        self.history: Any = []
        self.register_buffer("sums", torch.zeros(WIDTH))

    def plain(self, x: Any) -> Any:
        return super().forward(x).tanh()


class OwnGenerator(Linear):
    source = torch.Generator()

    def forward(self, x: Any) -> Any:
        return self.plain(x) * torch.rand(WIDTH, generator=self.source)
