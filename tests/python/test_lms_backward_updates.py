"""What the updates inside a backward share (`step_in_backward`), and what plans make of them."""

import random
import weakref

import pytest

torch = pytest.importorskip("torch")

from ebbtide import lms as module  # noqa: E402
from ebbtide.lms import optimizer_states  # noqa: E402
from ebbtide.lms.streaming import backward_steps, optimizer_step, step_copies  # noqa: E402
from lms_model import MIB, SMALL  # noqa: E402
from lms_states import Training, extension  # noqa: E402

pytestmark = [pytest.mark.sim_only, pytest.mark.usefixtures("no_states_left")]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Each weight of 1 MiB is a part of its own."""
    monkeypatch.setattr(backward_steps, "_PART_BYTES", MIB)


@pytest.fixture
def lanes_made(monkeypatch):
    """Each of slots of a device."""
    made, plain = [], step_copies.make_lanes

    def make_lanes(*arguments):
        lanes = plain(*arguments)
        made.append(weakref.ref(lanes))
        return lanes

    monkeypatch.setattr(step_copies, "make_lanes", make_lanes)
    return made


def test_all_parts_of_a_backward_pass_through_the_same_slots(lms, monkeypatch, lanes_made):
    """And nothing moves for good while activations want the room."""
    moves = []
    monkeypatch.setattr(
        optimizer_states, "_bring_states_back", lambda *_: moves.append(optimizer_step.is_in_backward())
    )
    with lms.enable(limit="64MiB", min_size=SMALL):
        training = Training()
        lms.step_in_backward(training.optimizer)
        training.step()
        assert extension().send_states_away(2**62) > 0
        for _ in range(3):
            lanes_made.clear()
            moves.clear()
            training.step()
            assert [lanes() for lanes in lanes_made] == [None], "one, which the end has given back"
            assert moves == [False], "in the program's step"


def test_a_failed_backward_gives_the_slots_back(lms, monkeypatch, lanes_made):
    monkeypatch.setattr(optimizer_states, "_bring_states_back", lambda *_: None)
    with lms.enable(limit="64MiB", min_size=SMALL):
        training = Training()
        lms.step_in_backward(training.optimizer)
        training.step()
        assert extension().send_states_away(2**62) > 0

        def fail(gradient):
            raise InterruptedError

        handle = training.model[0].weight.register_hook(fail)
        with pytest.raises(InterruptedError):
            training.forward().backward()
        assert [lanes() for lanes in lanes_made] == [None]
        handle.remove()
        training.optimizer.zero_grad()
        training.step()


def test_all_optimizers_of_a_backward_share_the_slots(lms, monkeypatch, lanes_made):
    monkeypatch.setattr(optimizer_states, "_bring_states_back", lambda *_: None)
    with lms.enable(limit="64MiB", min_size=SMALL):
        training = Training()
        optimizers = [torch.optim.AdamW([each], 1e-3) for each in training.model.parameters()]
        for optimizer in optimizers:
            lms.step_in_backward(optimizer)
        for step in range(3):
            lanes_made.clear()
            training.forward().backward()
            assert len(lanes_made) == (step > 0)
            for optimizer in optimizers:
                optimizer.step()
            extension().send_states_away(2**62)


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}])
def test_a_part_without_room_for_slots_leaves_others_theirs(lms, monkeypatch, options):
    """Also of an optimizer that has no states: weights and gradients on the host pass through."""
    refused, plain = [], step_copies.make_lanes

    def refuse_once(*arguments):
        if not refused:
            refused.append(arguments)
            raise torch.OutOfMemoryError("planted")
        return plain(*arguments)

    with lms.enable(limit="64MiB", min_size=SMALL):
        training = Training(torch.optim.SGD, **options)
        lms.step_in_backward(training.optimizer)
        training.step()
        assert extension().make_room_of_weights(0, 2**62) > 0
        monkeypatch.setattr(step_copies, "make_lanes", refuse_once)
        before = lms.stats()
        training.step()
        after = lms.stats()
        assert len(refused) == 1 and after["slow_reads"] == before["slow_reads"] + 1
        assert after["streamed_bytes"] > before["streamed_bytes"]


def test_a_program_that_steps_in_its_own_hooks_gets_its_states_back(lms):
    """Those have no other step, which would bring them."""
    with lms.enable(limit="64MiB", min_size=SMALL):
        training = Training()
        optimizers = {each: torch.optim.AdamW([each], 1e-3) for each in training.model.parameters()}

        def step(parameter):
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        handles = [parameter.register_post_accumulate_grad_hook(step) for parameter in optimizers]
        training.forward().backward()
        assert extension().send_states_away(2**62) > 0
        lms.limit = "1GiB"
        training.forward().backward()
        assert extension().state_host_bytes() == 0
        for handle in handles:  # the collector does not see what they hold
            handle.remove()


def test_a_forked_child_steps_where_lms_was_never_on(run_python):
    done = run_python(
        """
        import os
        import torch
        from ebbtide import lms
        from ebbtide.lms.streaming import backward_steps

        torch.set_num_threads(1)  # those of OpenMP do not live on in a child
        backward_steps._PART_BYTES = 1 << 10
        layer = torch.nn.Linear(64, 64)
        optimizer = torch.optim.AdamW(layer.parameters())
        lms.step_in_backward(optimizer)

        def train():
            for _ in range(2):
                layer(torch.randn(4, 64)).sum().backward()
                assert layer.weight.grad is None
                optimizer.step()

        train()
        if (child := os.fork()) == 0:
            try:
                train()
            except BaseException:
                os._exit(1)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        """
    )
    assert done.returncode == 0, done.stderr


def test_plans_know_how_much_the_states_are_that_a_backward_made(lms):
    """They are once in what it needs, though they came while it ran."""
    with lms.enable(limit="1GiB", min_size=SMALL):
        training = Training()
        training.step()
        training.step()
        needed = lms.stats()["peak_device_bytes"]
        del training
    with lms.enable(limit=needed - 6 * MIB, min_size=SMALL):
        training = Training()
        lms.step_in_backward(training.optimizer)
        for _ in range(6):
            training.step()
        assert (extension().planned_state_bytes() or 0) <= extension().state_host_bytes() < 12 * MIB


def fail(gradient):
    raise ArithmeticError


def run_random_steps(seed, steps, before_step=lambda step: None):
    """Some fail in backward, some end before it, some are steps of the program. Losses, and the result."""
    chooser = random.Random(seed)
    training = Training(depth=6)
    layers = [layer for layer in training.model if hasattr(layer, "weight")]
    handle, losses = module.step_in_backward(training.optimizer), []
    for step in range(steps):
        before_step(step)
        kind = chooser.choice(["plain"] * 4 + ["fails", "dropped", "removed", "twice"])
        failing = chooser.choice(layers).weight.register_hook(fail) if kind == "fails" else None
        if kind == "removed":
            handle.remove()
        training.optimizer.zero_grad()
        loss = training.forward(chooser.choice([64, 64, 256, 512]))
        losses.append(loss.item())
        try:
            if kind != "dropped":
                loss.backward(retain_graph=kind == "twice")
                training.optimizer.step()
            if kind == "twice":
                loss.backward()
                training.optimizer.step()
        except (ArithmeticError, RuntimeError) as error:  # a weight has changed since the forward
            assert isinstance(error, ArithmeticError) == (kind == "fails"), error
        if failing is not None:
            failing.remove()
        if kind == "removed":
            handle = module.step_in_backward(training.optimizer)
    handle.remove()
    return losses, training.result()


@pytest.mark.timeout(400)
def test_random_steps_under_random_limits(lms):
    plain = run_random_steps(3, 80)
    with lms.enable(limit="1GiB", min_size=SMALL):
        assert run_random_steps(3, 80) == plain
        needed = lms.stats()["peak_device_bytes"]
    chooser, moved = random.Random(4), []

    def change(step):
        if step % 6 == 0:
            lms.limit = int(needed * chooser.uniform(0.6, 1.1))
        if chooser.random() < 0.2:
            moved.append(extension().send_states_away(chooser.choice([MIB, 2**62])))

    with lms.enable(limit=int(0.8 * needed), min_size=SMALL):
        assert run_random_steps(3, 80, change) == plain
        assert sum(moved) > 0 and lms.stats()["streamed_bytes"] > 0
