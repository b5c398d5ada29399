"""Each thing that a trial finds beside the tensors, which then has happened once, as in a plain call."""

import array
import dataclasses
import functools
import itertools
import logging
import pathlib
import random
import re
import sys
import threading
import types
from typing import Any, ClassVar

import pytest

torch = pytest.importorskip("torch")
from ebbtide.lms.recompute.second_runs import DRAWS  # noqa: E402
from recompute_models import CALL, WIDTH, Linear, OwnGenerator, assert_equal, objection_to  # noqa: E402
from torch import nn  # noqa: E402


@pytest.fixture
def x() -> Any:
    torch.manual_seed(1)
    return torch.randn(2, 4, WIDTH)


def test_a_generator_of_its_own_draws_once(x: Any) -> None:
    OwnGenerator.source.manual_seed(1)
    module = OwnGenerator()
    assert objection_to(module, x) == "it draws random numbers from a generator of its own"
    after = OwnGenerator.source.get_state()
    OwnGenerator.source.manual_seed(1)
    torch.rand(WIDTH, generator=OwnGenerator.source)
    assert torch.equal(OwnGenerator.source.get_state(), after)


class SwapsStates(Linear):
    """As Megatron draws the random numbers of one rank."""

    state = torch.Generator().manual_seed(3).get_state()

    def forward(self, x: Any) -> Any:
        kept = torch.get_rng_state()
        torch.set_rng_state(SwapsStates.state)
        try:
            return nn.functional.dropout(self.plain(x), 0.5)
        finally:
            SwapsStates.state = torch.get_rng_state()
            torch.set_rng_state(kept)


def test_a_state_of_its_own_moves_once(x: Any) -> None:
    before = SwapsStates.state
    assert objection_to(SwapsStates(), x) == "it sets the state of torch's random numbers"
    after, SwapsStates.state = SwapsStates.state, before
    SwapsStates()(x)
    assert torch.equal(SwapsStates.state, after) and not torch.equal(before, after)


class AcrossTokens(nn.BatchNorm1d):
    def __init__(self, **options: Any) -> None:
        super().__init__(WIDTH, **options)

    def forward(self, x: Any) -> Any:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class Communicates(Linear):
    def forward(self, x: Any) -> Any:
        y = self.plain(x)
        torch.distributed.all_reduce(y.detach().clone())
        return y


class CommunicatesAsAFunction(Linear):
    def forward(self, x: Any) -> Any:
        from torch.distributed._functional_collectives import all_reduce

        return self.plain(x) + all_reduce(x, "sum", torch.distributed.group.WORLD)


@pytest.mark.parametrize("kind", [Communicates, CommunicatesAsAFunction])
def test_collectives(x: Any, kind: type, one_rank: None) -> None:
    assert objection_to(kind(), x).startswith("it communicates with other ranks (")


class Counts(Linear):
    def forward(self, x: Any) -> Any:
        self.calls += 1
        return self.plain(x)


class SameNumber(Linear):
    def forward(self, x: Any) -> Any:
        self.length = float(x.shape[1]) * 1000.5
        return self.plain(x)


class Switches(Linear):
    def forward(self, x: Any) -> Any:
        self.train(not self.training)
        return self.plain(x)


class Appends(Linear):
    def forward(self, x: Any) -> Any:
        self.history.append(1)
        return self.plain(x)


class WritesBuffer(Linear):
    def forward(self, x: Any) -> Any:
        self.sums += x.detach().sum((0, 1))
        return self.plain(x)


class WritesData(Linear):
    """A version of its own, so that only the bits tell."""

    def forward(self, x: Any) -> Any:
        self.sums.data.add_(1)
        return self.plain(x)


class WritesDataOnce(Linear):
    """The first run writes what is there already, so that only the watch tells."""

    def forward(self, x: Any) -> Any:
        self.sums.data.zero_()
        return self.plain(x)


class WritesWeight(Linear):
    def forward(self, x: Any) -> Any:
        with torch.no_grad():
            self.bias.add_(1)
        return self.plain(x)


class WritesLooseTensor(Linear):
    loose: Any = None

    def forward(self, x: Any) -> Any:
        vars(self)["scores"].add_(1)
        return self.plain(x)


class WritesArgument(Linear):
    def forward(self, x: Any) -> Any:
        x.add_(1)
        return self.plain(x)


class WritesAlias(Linear):
    def forward(self, x: Any) -> Any:
        x.data.mul_(1)
        return self.plain(x)


class Replaces(Linear):
    def forward(self, x: Any) -> Any:
        self.sums = self.sums + 1
        return self.plain(x)


class AddsToArgument(Linear):
    def forward(self, x: Any, states: Any) -> Any:
        states["last"] = 3
        return self.plain(x)


class Kept:
    """An object of the program, which is no module."""

    of_all: Any = []  # noqa: RUF012, as programs have it

    def __init__(self) -> None:
        self.losses: list[Any] = []
        self.latest: Any = None


class KeepsInAList(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.kept = Kept()

    def forward(self, x: Any) -> Any:
        self.kept.losses.append(x.detach().sum())
        return self.plain(x)


class KeepsInAClass(KeepsInAList):
    def forward(self, x: Any) -> Any:
        self.kept.of_all.append(x.detach().sum())
        return self.plain(x)


class KeepsInAnObject(KeepsInAList):
    def forward(self, x: Any) -> Any:
        self.kept.latest = x.detach().sum()
        return self.plain(x)


class PythonRandom(Linear):
    def forward(self, x: Any) -> Any:
        return self.plain(x) * random.random()


class NumpyRandom(Linear):
    def forward(self, x: Any) -> Any:
        import numpy

        return self.plain(x) * float(numpy.random.rand())


def test_numbers_that_are_computed_again_are_no_change(x: Any) -> None:
    module = SameNumber()
    assert objection_to(module, x) == "its forward changes the attribute length"
    assert objection_to(module, x) == ""


def test_an_import_of_numpy_is_no_random_number(x: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    numpy = pytest.importorskip("numpy.random")
    monkeypatch.delitem(sys.modules, "numpy.random")

    class Imports(Linear):
        def forward(self, x: Any) -> Any:
            sys.modules["numpy.random"] = numpy
            return self.plain(x)

    assert objection_to(Imports(), x) == ""


IN_PLACE = "it changes an argument or a tensor of the module in place"
FOUND = {
    Counts: "its forward changes the attribute calls",
    Switches: "its forward changes the attribute training",
    Appends: "its forward changes what history contains",
    WritesBuffer: "its forward changes sums in place",
    WritesData: "its forward changes sums in place",
    WritesDataOnce: f"{IN_PLACE} (zero_.default)",
    WritesWeight: "its forward changes bias in place",
    WritesLooseTensor: "its forward changes an argument or a tensor of the module in place",
    WritesArgument: "its forward changes an argument or a tensor of the module in place",
    WritesAlias: f"{IN_PLACE} (mul_.Tensor)",
    Replaces: "its forward changes the attribute sums",
    KeepsInAList: "its forward changes what kept.losses contains",
    KeepsInAClass: "its forward changes what kept.of_all contains",
    KeepsInAnObject: "its forward changes what kept contains",
    PythonRandom: DRAWS,
    NumpyRandom: DRAWS,
}


@pytest.mark.parametrize("kind", FOUND, ids=lambda kind: kind.__name__)
def test_changes_are_found_and_made_once(kind: type, x: Any) -> None:
    if kind is NumpyRandom:
        pytest.importorskip("numpy.random").seed(1)

    def leave(call: Any) -> list[Any]:
        torch.manual_seed(2)
        random.seed(1)
        module, argument = kind(), x.clone()
        vars(module)["scores"] = torch.zeros(1)
        call(module, argument)
        states = [module.calls, len(module.history), module.training, random.random()]
        return [argument, module.sums, module.bias, vars(module)["scores"], torch.tensor(states), torch.rand(1)]

    said: list[str] = []
    tried = leave(lambda module, argument: said.append(objection_to(module, argument)))
    assert said == [FOUND[kind]]
    assert_equal(tried, leave(CALL))


@dataclasses.dataclass
class Options:
    """What modules of other people hold."""

    width: int = 8
    kinds: ClassVar[list[str]] = ["a"]
    path: Any = pathlib.Path("here")
    names: Any = dataclasses.field(default_factory=lambda: {"a": [1, 2], "b": torch.float32})
    kind: Any = re.I
    log: Any = dataclasses.field(default_factory=lambda: logging.getLogger("here"))
    pattern: Any = re.compile("x")
    function: Any = nn.functional.gelu
    lock: Any = dataclasses.field(default_factory=threading.Lock)


def test_what_modules_hold_is_no_reason(x: Any) -> None:
    module = Linear()
    module.options, module.device, module.pair = Options(), x.device, (1, torch.Size([2]))
    module.bound, module.operator = functools.partial(torch.add, alpha=2), torch.ops.aten.add
    assert objection_to(module, x) == ""


class Slotted:
    __slots__ = ("count",)


@pytest.mark.parametrize(
    "make",
    [
        itertools.count,
        lambda: iter([1, 2]),
        lambda: bytearray(4),
        lambda: array.array("i", [0]),
        lambda: pytest.importorskip("numpy").zeros(1),
        lambda: pytest.importorskip("numpy.random").default_rng(1),
        lambda: random.Random(1),
        torch.Generator,
        Slotted,
    ],
)
@pytest.mark.parametrize("place", ["attribute", "list", "tuple", "object"])
def test_what_may_change_unseen_is_not_tried(make: Any, place: str, x: Any) -> None:
    """A second run would move it once more."""

    class Counted(Linear):
        runs = 0

        def forward(self, x: Any) -> Any:
            Counted.runs += 1
            return super().forward(x)

    module, hidden = Counted(), make()
    places = {"list": [hidden], "tuple": (hidden,), "object": types.SimpleNamespace(one=hidden)}
    module.kept = places.get(place, hidden)
    assert re.fullmatch(
        rf"it holds kept.*, a {type(hidden).__name__}, which may change unseen", objection_to(module, x)
    )
    assert Counted.runs == 1


@pytest.mark.parametrize("options", [{}, {"momentum": None}, {"counts": False}, {"tracks": False}], ids=str)
@pytest.mark.parametrize("kind", [nn.BatchNorm1d, AcrossTokens])
def test_running_statistics_move_once(x: Any, kind: Any, options: dict[str, Any]) -> None:
    def make() -> Any:
        given = {} if kind is AcrossTokens else {"num_features": 4}
        tracks = {"track_running_stats": options.get("tracks", True)}
        made = kind(momentum=options.get("momentum", 0.1), **given, **tracks)
        if not options.get("counts", True):
            made.num_batches_tracked = None
        return nn.Sequential(made)

    module, other = make(), make()
    assert objection_to(module, x) == ""
    other(x)
    assert_equal(list(module.buffers()), list(other.buffers()))
    assert objection_to(module.eval(), x) == ""
    assert_equal(list(module.buffers()), list(other.buffers()))


class NormalizesByThem(nn.BatchNorm1d):
    """In training, too, as when a network is fine-tuned with the statistics of another data set."""

    def forward(self, x: Any) -> Any:
        return nn.functional.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias)


class KeepsThemInBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("variance", torch.ones(4))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Any) -> Any:
        return nn.functional.batch_norm(x, self.mean, self.variance, self.scale, training=True)


def test_statistics_of_other_kinds(x: Any) -> None:
    """Kernels raise no version of them."""
    assert objection_to(NormalizesByThem(4), x) == "a layer of it may normalize by its running statistics"
    module, other = KeepsThemInBuffers(), KeepsThemInBuffers()
    assert objection_to(module, x) == "its forward changes mean in place"
    other(x)
    assert_equal(list(module.buffers()), list(other.buffers()))


def test_what_an_argument_contains(x: Any) -> None:
    assert objection_to(AddsToArgument(), x, {}) == "its forward changes what an argument contains"
