"""Large model support: the parts of a step in pieces, and the parameters that stay whole."""

import gc
import inspect
import random

import pytest

torch = pytest.importorskip("torch")

from ebbtide.lms import optimizer_states  # noqa: E402
from ebbtide.lms.streaming import host_ranges, optimizer_step, step_parts  # noqa: E402
from lms_model import MIB, SMALL  # noqa: E402
from lms_states import content, extension  # noqa: E402

pytestmark = pytest.mark.sim_only  # tests/gpu/test_gpu_lms_states.py is for GPUs


@pytest.fixture(autouse=True)
def _off(lms):
    yield
    gc.collect()
    lms.disable()


def run_by_hand(lms, make_optimizer, parameters, steps=4, is_on=True):
    """Weights after some steps, all of whose long-lived memory lies on the host from the second one on."""
    optimizer = make_optimizer(parameters)
    for step in range(steps):
        for number, parameter in enumerate(parameters):
            parameter.grad = torch.full_like(parameter, 0.1 * (step + number + 1))
        if is_on and step > 0:
            extension().send_states_away(2**62)
            extension().make_room_of_weights(0, 2**62)
        optimizer.step()
    return content(parameters)


def make_parameters(kind):
    torch.manual_seed(6)
    model = torch.nn.Sequential(torch.nn.Linear(512, 512, bias=False), torch.nn.Linear(512, 512, bias=False))
    first, second = model.parameters()
    if kind == "twice":
        return [first, second, first]
    if kind == "over one memory":
        return [first, torch.nn.Parameter(first.data[:300]), second]
    return [first, second]


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
@pytest.mark.parametrize("kind", ["twice", "over one memory"])
def test_parameters_that_share_memory_are_not_divided(lms, monkeypatch, kind):
    monkeypatch.setattr(optimizer_states, "_before_step", lambda *_: None)

    def make(parameters):
        return torch.optim.SGD(parameters, 0.1, momentum=0.9)

    plain = run_by_hand(lms, make, make_parameters(kind), is_on=False)
    lms.enable(limit="1GiB", min_size=SMALL)
    assert run_by_hand(lms, make, make_parameters(kind)) == plain


def test_groups_without_states_pass_through_as_well(lms, monkeypatch):
    monkeypatch.setattr(optimizer_states, "_before_step", lambda *_: None)

    def make(parameters):
        groups = [{"params": parameters[:1], "momentum": 0.0}, {"params": parameters[1:]}]
        return torch.optim.SGD(groups, 0.1, momentum=0.9)

    plain = run_by_hand(lms, make, make_parameters(""), is_on=False)
    lms.enable(limit="1GiB", min_size=SMALL)
    assert run_by_hand(lms, make, make_parameters("")) == plain
    assert lms.stats()["streamed_bytes"] >= 3 * 2 * MIB, "both weights, three steps"
    assert lms.stats()["slow_reads"] == 0


def test_momentum_that_is_switched_on_later(lms, monkeypatch):
    monkeypatch.setattr(optimizer_states, "_before_step", lambda *_: None)

    def train(is_on):
        parameters = make_parameters("")
        optimizer = torch.optim.SGD(parameters, 0.1)
        for step in range(6):
            optimizer.param_groups[0]["momentum"] = 0.9 if step > 2 else 0.0
            for parameter in parameters:
                parameter.grad = torch.full_like(parameter, 0.1 * step)
            if is_on:
                extension().make_room_of_weights(0, 2**62)
            optimizer.step()
        return content(parameters)

    plain = train(False)
    lms.enable(limit="1GiB", min_size=SMALL)
    assert train(True) == plain


def test_gradients_that_a_step_scales(lms, monkeypatch):
    """A fused step divides gradients by torch.amp's factor, where they lie."""
    monkeypatch.setattr(optimizer_states, "_before_step", lambda *_: None)

    def train(is_on):
        layer = make_parameters("")[0]
        optimizer, found = torch.optim.Adam([layer], 0.1, fused=True), []
        for step in range(3):
            loss = (layer * torch.full_like(layer, step + 1.0)).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(0.0)
            if is_on:
                extension().make_room_of_weights(0, 2**62)
            optimizer.step()
            found.append(layer.grad.sum().item())
        return found, content([layer])

    plain = train(False)
    lms.enable(limit="1GiB", min_size=SMALL)
    assert train(True) == plain


@pytest.mark.parametrize("seed", range(20))
def test_pieces_cover_each_element_once(seed):
    chooser = random.Random(seed)
    slot_bytes = chooser.choice([1, 2, 5]) * MIB
    parameters = [torch.nn.Parameter(torch.zeros(chooser.randrange(1, 3_000_000))) for _ in range(6)]
    optimizer = torch.optim.AdamW(parameters)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    states = [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]
    everything = [*parameters, *(each.grad for each in parameters), *states]
    chosen = [each for each in everything if chooser.random() < 0.6]
    hosted = host_ranges.HostRanges(sorted((each.data_ptr(), each.data_ptr() + each.nbytes) for each in chosen))
    parts = list(step_parts.divide(optimizer, hosted, slot_bytes))
    rest = [each for part in parts if isinstance(part, step_parts.Undivided) for each in part.parameters]
    whole = {id(each) for each in rest}
    assert len(whole) == len(rest)
    for chunk in parts:
        if isinstance(chunk, step_parts.Undivided):
            continue
        assert 0 < sum(piece.staged_bytes for piece in chunk.pieces) <= slot_bytes
        for piece in chunk.pieces:
            homes = [piece.home, piece.gradient, *piece.homes.values()]
            assert len({each.numel() for each in homes}) == 1
            assert len(piece.staged) == sum(any(_is_within(home, each) for each in chosen) for home in homes)
            piece.home.add_(1)
    for parameter in parameters:
        assert parameter.eq(0 if id(parameter) in whole else 1).all()


def _is_within(part, tensor):
    begin = tensor.data_ptr()
    return begin <= part.data_ptr() < begin + tensor.nbytes


def test_host_ranges():
    hosted = host_ranges.HostRanges([(100, 200), (300, 400)])
    for address, size_bytes, expected in [
        (0, 100, False),
        (0, 101, True),
        (199, 1, True),
        (200, 100, False),
        (200, 101, True),
        (250, 500, True),
        (400, 10, False),
    ]:
        assert hosted.holds_any(address, size_bytes) is expected


OPTIONS = [
    *({}, {"foreach": True}, {"fused": True}, {"maximize": True}, {"weight_decay": 0.1}),
    {"maximize": True, "foreach": True, "weight_decay": 0.1},
]


@pytest.mark.parametrize("name", sorted(optimizer_step._ELEMENTWISE))
def test_steps_leave_gradients_as_they_are(name):
    """So that those need not be copied back; this is torch's to change."""
    make = getattr(torch.optim, name)
    known = inspect.signature(make).parameters
    for options in (each for each in OPTIONS if known.keys() >= each.keys()):
        parameter = torch.nn.Parameter(torch.ones(70))
        parameter.grad = torch.linspace(-1, 1, 70)
        before = parameter.grad.clone()
        optimizer = make([parameter], lr=0.1, **options)
        for _ in range(3):
            optimizer.step()
        assert torch.equal(parameter.grad, before), options
