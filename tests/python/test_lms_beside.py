"""What the updates inside a backward share (`step_in_backward`), and what plans make of them."""

import weakref

import pytest

torch = pytest.importorskip("torch")

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
