"""Arguments of a recomputed call: tensors in any containers, seen by the hooks outside."""

import dataclasses
from collections import OrderedDict, namedtuple
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from recompute_models import WIDTH, Block, compare, run  # noqa: E402
from torch import nn  # noqa: E402


@pytest.fixture
def x() -> Any:
    torch.manual_seed(1)
    return torch.randn(2, 4, WIDTH)


Pair = namedtuple("Pair", "first second")


@dataclasses.dataclass
class Data:
    first: Any
    second: Any = None


@dataclasses.dataclass(frozen=True)
class Slots:
    __slots__ = ("first", "second")
    first: Any
    second: Any


class ModelOutput(OrderedDict):
    """As transformers': fields are items as well."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                OrderedDict.__setitem__(self, field.name, getattr(self, field.name))

    def __setitem__(self, key: str, value: Any) -> None:
        raise AssertionError("not called by a rebuilt one")


@dataclasses.dataclass
class Output(ModelOutput):
    first: Any = None
    second: Any = None


CONTAINERS = [
    lambda a, b: [a, b],
    lambda a, b: (a, (b, 3)),
    lambda a, b: {"first": a, "second": {"inner": b}},
    lambda a, b: OrderedDict(first=a, second=b),
    Pair,
    Data,
    Slots,
    Output,
]


class Takes(nn.Module):
    """Uses two tensors, wherever they lie."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, container: Any, *, factor: float, other: Any = None) -> Any:
        found: list[Any] = []
        open_all(container, found)
        if isinstance(container, Output):
            assert list(container) == ["first", "second"] and container.first is container["first"]
        result = factor * self.block(found[0]) * found[1].tanh()
        return Data(result, (result * 2 if other is None else other["more"][0] * result,))


def open_all(value: Any, found: list[Any]) -> None:
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, dict):
        for one in value.values():
            open_all(one, found)
    elif isinstance(value, list | tuple):
        for one in value:
            open_all(one, found)
    elif dataclasses.is_dataclass(value):
        open_all([value.first, value.second], found)


@pytest.mark.parametrize(
    "make", CONTAINERS, ids=["list", "tuple", "dict", "ordered", "named", "data", "slots", "output"]
)
def test_tensors_in_containers(make: Any, x: Any) -> None:
    torch.manual_seed(0)
    module, y, z = Takes(), torch.randn_like(x), torch.randn_like(x)

    def step(module: Any) -> Any:
        result = module(make(x, y), factor=0.5, other={"more": [z]})
        return (result.first + result.second[0]).sum()

    assert compare(module, step, Takes) == 1


def test_all_tensors_of_containers_are_seen_outside(x: Any) -> None:
    module, y, z = Takes(), torch.randn_like(x), torch.randn_like(x)
    seen: list[int] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda one: seen.append(one.data_ptr()) or one, lambda one: one)
    with hooks:
        run(module, {"first": x, "second": y}, factor=0.5, other={"more": [z]})
    assert {x.data_ptr(), y.data_ptr(), z.data_ptr()} == set(seen) - {0}  # of an empty one before torch 2.13


def test_the_first_run_gets_the_containers_of_the_program(x: Any) -> None:
    class Adds(nn.Linear):
        def forward(self, x: Any, states: Any = None) -> Any:
            states.append(x)
            return super().forward(x)

    states: list[Any] = []
    run(Adds(WIDTH, WIDTH), x, states=states)
    assert len(states) == 1 and states[0] is x


def test_arguments_that_are_the_same_stay_the_same(x: Any) -> None:
    """Attention has another kernel if query, key and value are one tensor."""
    torch.manual_seed(0)
    module = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
    x.requires_grad_()

    def step(module: Any) -> Any:
        return module(x * 2, x * 2, x * 2)[0].sum() + module(query=(y := x * 3), key=y, value=y)[0].sum()

    assert compare(module, step, nn.MultiheadAttention) == 2


def test_identity_survives_hooks_that_return_another_tensor(x: Any) -> None:
    """As those of LMS may."""

    class Compares(nn.Linear):
        def forward(self, x: Any, y: Any) -> Any:
            return super().forward(x).sin().cos() if x is y else super().forward(x).sin()

    module = Compares(WIDTH, WIDTH)
    with torch.autograd.graph.saved_tensors_hooks(lambda one: one.clone(), lambda one: one):
        loss = run(module, x, x).sum()
    loss.backward()
    assert module.weight.grad is not None
