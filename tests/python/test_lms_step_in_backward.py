"""`step_in_backward`: parameters are updated as soon as their gradients are there."""

import gc
import threading
import time
import weakref

import pytest

torch = pytest.importorskip("torch")

from ebbtide import StateError, lms  # noqa: E402
from ebbtide.lms import loaded_states, optimizer_states  # noqa: E402
from ebbtide.lms.streaming import backward_steps, optimizer_step  # noqa: E402
from lms_model import MIB, SMALL  # noqa: E402
from lms_states import Training, content, extension  # noqa: E402

pytestmark = [pytest.mark.sim_only, pytest.mark.usefixtures("no_states_left")]

KINDS = [
    (torch.optim.AdamW, {}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.Adam, {"foreach": True, "amsgrad": True}),
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"momentum": 0.9}),
]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Each weight of 1 MiB is a part of its own."""
    monkeypatch.setattr(backward_steps, "_PART_BYTES", MIB)


def run(training, steps=4):
    return [training.step() for _ in range(steps)]


def result(training):
    """Parameters and states in the order of the parameters: states are made in another one."""
    parameters = [*training.model.parameters()]
    states = [each for parameter in parameters for each in training.optimizer.state[parameter].values()]
    return content([*parameters, *filter(torch.is_tensor, states)])


@pytest.mark.parametrize(("make", "options"), KINDS)
def test_results_are_the_same(make, options):
    plain, training = Training(make, **options), Training(make, **options)
    with lms.step_in_backward(training.optimizer):
        assert run(training) == run(plain)
    assert run(training) == run(plain), "and the end of it changes nothing"
    assert result(training) == result(plain)


@pytest.mark.parametrize(("make", "options"), [kind for kind in KINDS if kind[1] != {} or kind[0] != torch.optim.SGD])
def test_states_on_the_host_pass_through(lms, monkeypatch, make, options):
    monkeypatch.setattr(optimizer_states, "_bring_states_back", lambda *_: None)
    plain = Training(make, **options)
    expected = run(plain)
    with lms.enable(limit="64MiB", min_size=SMALL):
        training = Training(make, **options)
        lms.step_in_backward(training.optimizer)
        losses = run(training, 1)
        assert extension().send_states_away(2**62) > 0
        losses += run(training, 3)
        assert (losses, result(training)) == (expected, result(plain))
        assert lms.stats()["streamed_bytes"] > 0 and lms.stats()["slow_reads"] == 0


def test_gradients_go_as_they_are_used(lms):
    peaks = []
    for is_in_backward in (True, False):  # memory of the first stays cached
        with lms.enable(limit="1GiB", min_size=SMALL):
            training = Training(torch.optim.SGD, depth=32)
            if is_in_backward:
                lms.step_in_backward(training.optimizer)
            for _ in range(2):
                training.step(batch=16)
            peaks.append(lms.stats()["peak_device_bytes"])
        del training
    assert peaks[0] < peaks[1] - 20 * MIB


def test_groups_rates_and_hooks_are_those_of_the_program():
    results, calls = [], []
    for is_in_backward in (False, True):
        training = Training(torch.optim.SGD)
        parameters = [*training.model.parameters()]
        groups = [{"params": parameters[::2], "lr": 0.1}, {"params": parameters[1::2], "weight_decay": 0.1}]
        training.optimizer = torch.optim.SGD(groups, lr=0.01)
        training.optimizer.register_step_pre_hook(lambda *_: calls.append("hook"))
        rates = torch.optim.lr_scheduler.ExponentialLR(training.optimizer, 0.5)
        if is_in_backward:
            lms.step_in_backward(training.optimizer)
        for _ in range(3):
            training.step()
            rates.step()
        results.append(result(training))
    assert results[0] == results[1] and len(calls) == 6


def test_what_is_smaller_than_a_part_waits_for_the_step(monkeypatch):
    monkeypatch.setattr(backward_steps, "_PART_BYTES", 1 << 40)
    plain, training = Training(), Training()
    lms.step_in_backward(training.optimizer)
    training.forward().backward()
    assert all(each.grad is not None for each in training.model.parameters())
    training.optimizer.step()
    plain.step()
    assert result(training) == result(plain)


def test_a_second_gradient_is_refused_and_told_once():
    training = Training(torch.optim.SGD)
    handle = lms.step_in_backward(training.optimizer)
    for end in (training.optimizer.step, training.optimizer.zero_grad):
        training.forward().backward()
        with pytest.raises(StateError, match="got a second before optimizer"):
            training.forward().backward()
        end()
        training.step()
    handle.remove()
    handle.remove()
    for _ in range(2):
        training.forward().backward()


def test_a_failed_backward_leaves_no_trace():
    """Out of memory, say, after some updates. What was updated stays so."""
    training = Training(torch.optim.SGD)
    handle = lms.step_in_backward(training.optimizer)
    fails = [True]

    def fail(gradient):
        if fails[0]:
            raise torch.OutOfMemoryError("in backward")

    training.model[0].weight.register_hook(fail)
    before = content(training.model.parameters())
    with pytest.raises(torch.OutOfMemoryError):
        training.forward().backward()
    fails[0] = False
    partly = content(training.model.parameters())
    assert sum(one != other for one, other in zip(before, partly, strict=True)) not in (0, len(before))
    training.optimizer.zero_grad()
    plain = Training(torch.optim.SGD)
    plain.model.load_state_dict(training.model.state_dict())
    plain.generator.set_state(training.generator.get_state())
    assert run(training) == run(plain) and result(training) == result(plain)
    handle.remove()


def test_a_backward_inside_another_is_no_failed_one():
    """One weight in two of them gets two gradients, and what lies between belongs to the outer one."""
    from torch.utils.checkpoint import checkpoint

    training = Training(torch.optim.SGD)
    lms.step_in_backward(training.optimizer)
    first, between, last = training.model[:5:2]
    hidden = torch.randn(8, 512, requires_grad=True)
    loss = last(checkpoint(first, between(checkpoint(first, hidden, use_reentrant=True)), use_reentrant=True)).mean()
    with pytest.raises(StateError, match="got a second before optimizer"):
        loss.backward()


def test_gradients_that_the_program_dropped_count_no_more(monkeypatch):
    monkeypatch.setattr(backward_steps, "_PART_BYTES", 2 * MIB)
    one, other = (torch.nn.Linear(512, 512, bias=False) for _ in range(2))
    optimizer = torch.optim.SGD([one.weight, other.weight])
    lms.step_in_backward(optimizer)
    for layer in (one, other):
        optimizer.zero_grad()
        layer(torch.randn(8, 512)).mean().backward()
    assert other.weight.grad is not None, "1 MiB is no part yet"


def test_one_thread_at_a_time_updates(monkeypatch):
    """autograd has one for each device. Groups must be as they were after it."""
    training, inside, most = Training(torch.optim.SGD), [], []

    def slow_step(optimizer):
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.02)
        inside.pop()

    monkeypatch.setattr(optimizer_step, "inner_step", lambda owner: slow_step)
    groups = training.optimizer.param_groups
    lms.step_in_backward(training.optimizer)
    losses = [layer(torch.randn(8, 512)).mean() for layer in training.model[:7:2]]
    threads = [threading.Thread(target=loss.backward) for loss in losses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(most) == 4 and max(most) == 1 and training.optimizer.param_groups is groups


def test_hooks_of_all_optimizers_see_the_steps_of_the_program_alone():
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    calls = []
    handles = [
        register_optimizer_step_pre_hook(lambda optimizer, *_: calls.append(optimizer)),
        register_optimizer_step_post_hook(lambda optimizer, *_: calls.append(optimizer)),
    ]
    try:
        training = Training()
        lms.step_in_backward(training.optimizer)
        training.step()
    finally:
        for handle in handles:
            handle.remove()
    assert [each is training.optimizer for each in calls] == [True, True]


def test_a_part_does_not_look_at_all_states(lms, monkeypatch):
    looked, movable = [], loaded_states._movable

    def counted(states):
        for each in movable(states):
            looked.append(each)
            yield each

    monkeypatch.setattr(loaded_states, "_movable", counted)
    with lms.enable(limit="64MiB", min_size=SMALL):
        training = Training()
        lms.step_in_backward(training.optimizer)
        run(training, 1)
        of_first = len(looked)
        run(training, 1)
        looked.clear()
        run(training, 1)
    assert of_first <= 4 * 16, "states that are made: not all at each part"
    assert 0 < len(looked) <= len(training.model) + 1, "one for each part, and for the step"


class Counted(torch.nn.Parameter):
    """Counts how often its size is asked for."""

    asked = 0

    @property
    def nbytes(self):
        Counted.asked += 1
        return super().nbytes


def test_many_small_parameters_cost_linear_time():
    parameters = [Counted(torch.ones(4)) for _ in range(300)]
    optimizer = torch.optim.SGD(parameters)
    lms.step_in_backward(optimizer)
    Counted.asked = 0
    sum(each.sum() for each in parameters).backward()
    assert 0 < Counted.asked <= 2 * len(parameters)


def test_an_optimizer_that_is_gone_updates_nothing():
    training = Training(torch.optim.SGD)
    lms.step_in_backward(training.optimizer)
    gone = weakref.ref(training.optimizer)
    gc.disable()
    try:
        training.optimizer = torch.optim.SGD(training.model.parameters(), lr=0.0)
        assert gone() is None
    finally:
        gc.enable()
    assert not any(each._post_accumulate_grad_hooks for each in training.model.parameters())
    before = content(training.model.parameters())
    lms.step_in_backward(training.optimizer)
    run(training)
    assert content(training.model.parameters()) == before


def test_one_optimizer_at_a_time():
    training = Training(torch.optim.SGD)
    handle = lms.step_in_backward(training.optimizer)
    other = torch.optim.SGD([training.model[0].weight])
    for optimizer in (training.optimizer, other):
        with pytest.raises(StateError, match="updates these parameters already"):
            lms.step_in_backward(optimizer)
    handle.remove()
    lms.step_in_backward(other).remove()


def test_parameters_over_one_memory_are_refused():
    one, other = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    other.weight.data = one.weight.data
    with pytest.raises(StateError, match="some of them share memory"):
        lms.step_in_backward(torch.optim.SGD([one.weight, other.weight]))


def test_groups_may_come_and_go():
    results = []
    for is_in_backward in (False, True):
        training = Training(torch.optim.SGD)
        parameters = [*training.model.parameters()]
        groups = [{"params": [each], "lr": 0.1 * (1 + number)} for number, each in enumerate(parameters)]
        training.optimizer = torch.optim.SGD(groups)
        if is_in_backward:
            lms.step_in_backward(training.optimizer)
        training.step()
        del training.optimizer.param_groups[0]  # the others move up
        training.step()
        training.optimizer.zero_grad()
        training.forward().backward()
        assert parameters[0].grad is not None, "of no optimizer any more"
        training.optimizer.step()
        results.append(content(parameters))
    assert results[0] == results[1]


def test_frozen_parameters_are_left_alone():
    training = Training(torch.optim.SGD)
    training.model[0].weight.requires_grad_(False)
    before = training.model[0].weight.clone()
    lms.step_in_backward(training.optimizer)
    training.step()
    assert torch.equal(training.model[0].weight, before)


class Another(torch.optim.SGD):
    """A class that ebbtide does not know."""


@pytest.mark.parametrize("make", [Another, torch.optim.LBFGS, torch.optim.SparseAdam])
def test_other_optimizers_are_refused(make):
    with pytest.raises(StateError, match=f"step_in_backward can't take {make.__name__}"):
        lms.step_in_backward(Training(make).optimizer)


def test_several_processes_are_refused(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(StateError, match="before processes have exchanged gradients"):
        lms.step_in_backward(Training().optimizer)
