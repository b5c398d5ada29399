"""How many optimizer states stay on the host for the sake of activations."""

import itertools
import types

import pytest

pytest.importorskip("torch")

from ebbtide import _core
from ebbtide.lms import optimizer_states
from ebbtide.lms.streaming.balance import Sample, more_bytes
from hypothesis import given
from hypothesis import strategies as some
from lms_model import SMALL
from lms_states import TAG, Training, extension

RATE = 50e9  # bytes a second


def steps(*waits, seconds=(1.0, 1.0, 1.0)):
    """Samples around three steps, of which the device waited so long in each."""
    ends, waited = itertools.accumulate((10.0, *seconds)), itertools.accumulate((3.0, *waits))
    return [Sample(*each) for each in zip(ends, waited, strict=True)]


@pytest.mark.parametrize(("waited", "more"), [(0.0, 0), (0.01, 0), (0.04, 1_000_000_000), (0.4, 10_000_000_000)])
def test_half_of_what_the_bus_carries_meanwhile(waited, more):
    assert more_bytes(steps(waited, waited, waited), RATE) == pytest.approx(more, abs=1)


def test_the_shortest_wait_of_three_steps_counts():
    assert more_bytes(steps(0.5, 0.1, 0.9), RATE) == pytest.approx(2_500_000_000, abs=1)
    longer = steps(0.0, 0.0, 0.1, 0.1, 0.1, seconds=[1.0] * 5)
    assert more_bytes(longer, RATE) == pytest.approx(2_500_000_000, abs=1)


@pytest.mark.parametrize("seconds", [(1.0, 1.0, 1.2), (4.0, 1.0, 1.0), (1.0, 0.8, 1.0)])
def test_steps_that_are_not_alike_tell_nothing(seconds):
    assert more_bytes(steps(0.4, 0.4, 0.4, seconds=seconds), RATE) == 0


@pytest.mark.parametrize("count", [0, 1, 3])
def test_too_few_steps_tell_nothing(count):
    assert more_bytes(steps(0.4, 0.4, 0.4)[:count], RATE) == 0


@given(waited=some.floats(0, 10), rest=some.floats(0, 10), rate=some.floats(1e9, 1e12))
def test_passing_them_through_takes_less_time_than_the_wait(waited, rest, rate):
    """Both directions of the bus work at once in a step, and not at full speed: that of an H200 at 83 % each."""
    more = more_bytes(steps(waited, waited, waited, seconds=[waited + rest] * 3), rate)
    assert 0 <= more / (0.83 * rate) <= waited + 1e-6


@pytest.mark.sim_only
@pytest.mark.usefixtures("no_states_left")
@pytest.mark.parametrize(("wait", "stay"), [(1.0, "host"), (0.0, "device")])
def test_where_the_device_waits_for_activations_states_stay_on_the_host(lms, monkeypatch, wait, stay):
    """The simulated device never waits by itself: its threads do. Each step takes 4 seconds here."""
    module, clock = extension(), itertools.count(0.0, 4.0)
    found, waited = module.statistics, itertools.count(0.0, wait)
    plain = Training()
    expected = [plain.step() for _ in range(7)], plain.result()
    with lms.enable(limit="1GiB", min_size=SMALL):
        training = Training()
        monkeypatch.setattr(module, "statistics", lambda: {**found(), "stream_waited_seconds": next(waited)})
        monkeypatch.setattr(optimizer_states, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))
        losses = [training.step() for _ in range(7)]
        monkeypatch.undo()
        status = _core.query_tag(TAG)
        assert status.host_bytes == (status.resident_bytes if stay == "host" else 0)
        assert (lms.stats()["streamed_bytes"] > 0) == (stay == "host")
        assert (losses, training.result()) == expected
