"""Large model support: a step whose states lie on the host runs in pieces that pass through the device."""

import random
import sys

import pytest

torch = pytest.importorskip("torch")

from ebbtide import _core  # noqa: E402
from ebbtide.lms import optimizer_states  # noqa: E402
from ebbtide.lms.streaming import optimizer_step, step_copies  # noqa: E402
from lms_model import MIB, SMALL, computed_once  # noqa: E402
from lms_states import TAG, Interrupts, Training, content, extension  # noqa: E402

pytestmark = [  # tests/gpu/test_gpu_lms.py is for GPUs
    pytest.mark.sim_only,
    pytest.mark.usefixtures("no_states_left"),
]


@pytest.fixture
def states_stay_away(lms, monkeypatch):
    """States that a test sends to the host stay there, also where the device has room."""
    monkeypatch.setattr(optimizer_states, "_bring_states_back", lambda *_: None)
    return lms


def send_all_away():
    assert extension().send_states_away(2**62) > 0


def addresses(training):
    return [each.data_ptr() for each in [*training.model.parameters(), *training.states()]]


def steps_in_pieces(lms, make, steps=4, limit="1GiB", away=send_all_away, **options):
    """Losses, weights and states of a training whose states lie on the host from the second step on. Nothing changes
    its address."""
    with lms.enable(limit=limit, min_size=SMALL):
        training, losses = Training(make=make, **options), []
        for step in range(steps):
            losses.append(training.step())
            if step == 0:
                away()
                before = addresses(training)
        assert addresses(training) == before
        return losses, training.result(), lms.stats()


@computed_once
def steps_without(make, steps=4, **options):
    training = Training(make=make, **options)
    return [training.step() for _ in range(steps)], training.result()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ASGD", {}),
        ("ASGD", {"foreach": True}),
        ("Adadelta", {}),
        ("Adagrad", {"lr_decay": 0.1}),
        ("Adam", {"amsgrad": True, "weight_decay": 0.1}),
        ("Adam", {"fused": True}),
        ("AdamW", {"foreach": True}),
        ("AdamW", {"maximize": True}),
        ("Adamax", {}),
        ("NAdam", {}),
        ("NAdam", {"foreach": True}),
        ("RAdam", {"foreach": True}),
        ("RMSprop", {"centered": True, "momentum": 0.5}),
        ("Rprop", {}),
        ("SGD", {"momentum": 0.9, "nesterov": True}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value) or "plain",
)
def test_each_optimizer_computes_the_same(states_stay_away, name, options):
    """1 MiB for each parameter and state, in slots of 1 MiB: each parameter is divided."""
    make = getattr(torch.optim, name)
    plain = steps_without(make, **options)
    losses, result, numbers = steps_in_pieces(states_stay_away, make, limit="64MiB", **options)
    assert (losses, result) == plain
    assert numbers["streamed_bytes"] >= 3 * 8 * MIB, "a state, three steps"
    assert numbers["state_loaded_bytes"] == numbers["slow_reads"] == 0


def test_the_list_is_all_that_torch_has_of_the_kind():
    """Those that are left out need more than an element: a factor, a history, sparse gradients."""
    others = {"Adafactor", "LBFGS", "Muon", "Optimizer", "SparseAdam"}
    found = {
        name
        for name, each in vars(torch.optim).items()
        if isinstance(each, type) and issubclass(each, torch.optim.Optimizer)
    }
    assert found - others == set(optimizer_step._ELEMENTWISE)


class Odd(torch.nn.Module):
    """Parameters that can be divided, and some that can't."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.conv = torch.nn.Conv2d(64, 256, 3).to(memory_format=torch.channels_last)
        self.narrow = torch.nn.Linear(512, 512, dtype=torch.bfloat16)
        self.table = torch.nn.Embedding(2048, 128)
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        self.transposed = torch.nn.Parameter(torch.randn(256, 1024).t())
        self.unused = torch.nn.Linear(256, 256)
        self.frozen = torch.nn.Linear(64, 64).requires_grad_(False)

    def forward(self, generator):
        image = torch.randn(2, 64, 8, 8, generator=generator).to(memory_format=torch.channels_last)
        row = torch.randn(4, 512, generator=generator)
        found = self.conv(image).pow(2).mean() + self.narrow(row.bfloat16()).float().pow(2).mean()
        found = found + self.table(torch.arange(0, 2048, 3)).pow(2).mean()
        return self.scale * (found + (row @ self.transposed[:512]).pow(2).mean())


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_odd_parameters_and_groups(states_stay_away, share):
    def train(away):
        model, generator = Odd(), torch.Generator().manual_seed(1)
        groups = [
            {"params": [*model.conv.parameters(), model.scale], "lr": 1e-2},
            {"params": [*model.narrow.parameters(), model.transposed], "weight_decay": 0.1},
            {"params": [*model.table.parameters(), *model.unused.parameters(), *model.frozen.parameters()]},
        ]
        optimizer = torch.optim.AdamW(groups, 1e-3)
        losses = []
        for step in range(4):
            optimizer.zero_grad()
            loss = model(generator)
            loss.backward()
            if step == 2:  # laid out unlike its parameter
                model.transposed.grad = model.transposed.grad.contiguous()
            optimizer.step()
            losses.append(loss.item())
            if step == 0:
                away()
        states = [each for state in optimizer.state.values() for each in state.values()]
        return losses, content(model.parameters()), content(each.contiguous() for each in states)

    plain = train(lambda: None)

    def away():
        held = _core.query_tag(TAG).resident_bytes
        assert extension().send_states_away(int(share * held)) > 0

    with states_stay_away.enable(limit="1GiB", min_size=SMALL):
        assert train(away) == plain
        assert states_stay_away.stats()["streamed_bytes"] > 0


def test_weights_and_gradients_on_the_host_pass_through_as_well(states_stay_away, monkeypatch):
    plain = steps_without(torch.optim.AdamW)

    def away():
        send_all_away()
        assert extension().make_room_of_weights(0, 2**62) > 0

    _, _, of_states = steps_in_pieces(states_stay_away, torch.optim.AdamW)
    monkeypatch.setattr(optimizer_states, "_before_step", lambda *_: away_again())
    hosted = []

    def away_again():
        if extension().state_host_bytes():
            extension().make_room_of_weights(0, 2**62)
            hosted.append(_core.query_tag("lms.weights").host_bytes)

    losses, result, numbers = steps_in_pieces(states_stay_away, torch.optim.AdamW, away=away)
    assert (losses, result) == plain
    assert min(hosted) >= 8 * MIB
    assert numbers["streamed_bytes"] >= of_states["streamed_bytes"] + 3 * 8 * MIB


@pytest.mark.parametrize("is_first", [True, False], ids=["before the optimizer", "after it"])
def test_hooks_of_a_step_run_once(states_stay_away, is_first):
    lms, seen = states_stay_away, []
    if is_first:
        lms.enable(limit="1GiB", min_size=SMALL)
    training = Training()
    scheduler = torch.optim.lr_scheduler.StepLR(training.optimizer, 1, 0.5)
    if not is_first:
        lms.enable(limit="1GiB", min_size=SMALL)
    training.optimizer.register_step_pre_hook(lambda optimizer, *_: seen.append(optimizer))
    training.optimizer.register_step_post_hook(lambda optimizer, *_: seen.append(optimizer))
    training.step()
    send_all_away()
    training.step()
    scheduler.step()
    assert seen == [training.optimizer] * 4
    assert lms.stats()["streamed_bytes"] > 0
    assert training.optimizer._opt_called


def test_a_scheduler_that_is_older_than_lms(lms):
    """It has kept the `step` of then."""
    training = Training()
    torch.optim.lr_scheduler.StepLR(training.optimizer, 1)
    kept = training.optimizer.step
    lms.enable(limit="1GiB", min_size=SMALL)
    training.step()
    assert {_core.find(each.data_ptr()).tag for each in training.states()} == {TAG}
    lms.disable()
    assert training.optimizer.step is kept
    training.step()


@pytest.mark.filterwarnings("error:Dynamo")
def test_a_compiled_step_is_not_compiled_for_each_piece(states_stay_away):
    lms = states_stay_away
    torch._dynamo.reset()
    counts = torch._dynamo.utils.counters["stats"]
    before = counts["unique_graphs"]
    lms.enable(limit="64MiB", min_size=SMALL)
    training = Training()
    step = torch.compile(training.optimizer.step, backend="eager")
    for number in range(4):
        training.optimizer.zero_grad()
        training.forward().backward()
        step()
        if number == 0:
            send_all_away()
    assert lms.stats()["streamed_bytes"] >= 3 * 16 * MIB
    assert counts["unique_graphs"] - before <= 2


class Scaled(torch.optim.AdamW):
    """It might do anything."""


@pytest.mark.parametrize("make", [Scaled, torch.optim.Adafactor])
def test_other_optimizers_read_over_the_bus(states_stay_away, make):
    plain = steps_without(make)
    losses, result, numbers = steps_in_pieces(states_stay_away, make)
    assert (losses, result) == plain
    assert numbers["streamed_bytes"] == 0 and numbers["slow_reads"] == 3


def test_differentiable_steps_are_left_alone():
    weight = torch.nn.Parameter(torch.zeros(4))
    assert optimizer_step.is_possible(torch.optim.Adam([weight]))
    assert not optimizer_step.is_possible(torch.optim.Adam([weight], differentiable=True))


def test_a_foreign_wrapper_sees_one_step(states_stay_away, monkeypatch):
    calls, plain = [], torch.optim.AdamW.step

    def counting(self, *arguments):
        calls.append(self)
        return plain(self, *arguments)

    monkeypatch.setattr(torch.optim.AdamW, "step", counting)
    _, _, numbers = steps_in_pieces(states_stay_away, torch.optim.AdamW, steps=3)
    assert len(calls) == 3
    assert numbers["streamed_bytes"] == 0


def test_without_room_for_slots_the_step_reads_over_the_bus(states_stay_away, monkeypatch):
    def refuse(*_):
        raise torch.OutOfMemoryError("planted")

    plain = steps_without(torch.optim.AdamW)
    monkeypatch.setattr(step_copies, "make_lanes", refuse)
    losses, result, numbers = steps_in_pieces(states_stay_away, torch.optim.AdamW)
    assert (losses, result) == plain
    assert numbers["streamed_bytes"] == 0 and numbers["slow_reads"] == 3


@pytest.mark.parametrize("fails_at", [1, 2, 7])
def test_a_step_that_fails_keeps_what_was_done(states_stay_away, monkeypatch, fails_at):
    """Weights, states and counters agree in every parameter, and a later step goes on from there."""
    states_stay_away.enable(limit="1GiB", min_size=SMALL)
    monkeypatch.setattr(optimizer_step, "_MOST_SLOT_BYTES", MIB)
    training, calls = Training(depth=4), []
    training.step()
    before = [each.clone() for each in training.model.parameters()]
    send_all_away()
    module = sys.modules["torch.optim.adam"]  # torch.optim deletes its name
    adam = module.adam

    def failing(parameters, *arguments, **options):
        calls.append(parameters)
        if len(calls) == fails_at:
            raise ArithmeticError
        return adam(parameters, *arguments, **options)

    monkeypatch.setattr(module, "adam", failing)
    training.optimizer.zero_grad()
    training.forward().backward()
    with pytest.raises(ArithmeticError):
        training.optimizer.step()
    monkeypatch.setattr(module, "adam", adam)
    state = training.optimizer.state
    for parameter, old in zip(training.model.parameters(), before, strict=True):
        if int(state[parameter]["step"]) == 2:
            assert not torch.equal(parameter, old)
    training.optimizer.step()
    assert all(int(each["step"]) in (2, 3) for each in state.values())
    assert all(each.isfinite().all() for each in training.states())


def test_scaled_gradients(states_stay_away):
    """torch.amp leaves its factors on the optimizer; a step that overflows changes nothing."""

    def train(away):
        training = Training(fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        for step in range(4):
            training.optimizer.zero_grad()
            loss = training.forward() * (float("inf") if step == 2 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(training.optimizer)
            scaler.update()
            if step == 0:
                away()
        return training.result(), scaler.get_scale()

    plain = train(lambda: None)
    with states_stay_away.enable(limit="1GiB", min_size=SMALL):
        assert train(send_all_away) == plain
        assert states_stay_away.stats()["streamed_bytes"] > 0


def test_interrupts_lose_no_state(states_stay_away):
    chooser = random.Random(4)
    states_stay_away.enable(limit="1GiB", min_size=SMALL)
    training = Training(depth=2)
    training.step()
    send_all_away()
    with Interrupts() as interrupts:
        for _ in range(60):
            training.optimizer.zero_grad()
            training.forward(16).backward()
            interrupts.after(chooser.uniform(1e-4, 1e-2), training.optimizer.step, 20)
    assert interrupts.count > 0
    assert all(each.isfinite().all() for each in training.states())
    training.step()
