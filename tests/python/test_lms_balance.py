"""How many optimizer states stay on the host for the sake of activations."""

import itertools

import pytest

pytest.importorskip("torch")

from ebbtide import _core
from ebbtide.lms.streaming.balance import Sample, more_bytes
from hypothesis import given
from hypothesis import strategies as some
from lms_model import SMALL
from lms_states import TAG, Training, extension

RATE = 50e9  # bytes a second


def steps(waited, seconds=1.0, disturbances=0):
    return Sample(10.0, 3.0, 7), Sample(10.0 + seconds, 3.0 + waited, 7 + disturbances)


@pytest.mark.parametrize(("waited", "more"), [(0.0, 0), (0.01, 0), (0.04, 1_000_000_000), (0.4, 10_000_000_000)])
def test_half_of_what_the_bus_carries_meanwhile(waited, more):
    assert more_bytes(*steps(waited), RATE) == pytest.approx(more, abs=1)


@pytest.mark.parametrize("disturbances", [1, 5])
def test_a_step_unlike_the_others_tells_nothing(disturbances):
    assert more_bytes(*steps(0.4, disturbances=disturbances), RATE) == 0


@given(
    waited=some.floats(0, 10),
    rest=some.floats(0, 10),
    rate=some.floats(1e9, 1e12),
)
def test_passing_them_through_takes_less_time_than_the_wait(waited, rest, rate):
    """Both directions of the bus work at once in a step, and not at full speed: that of an H200 at 83 % each."""
    more = more_bytes(*steps(waited, waited + rest), rate)
    assert 0 <= more / (0.83 * rate) <= waited + 1e-6


@pytest.mark.sim_only
@pytest.mark.usefixtures("no_states_left")
@pytest.mark.parametrize(("waits", "stay"), [((1000.0, 1000.0, 1000.0), "host"), ((0.0, 0.0, 0.0), "device")])
def test_where_the_device_waits_for_activations_states_stay_on_the_host(lms, monkeypatch, waits, stay):
    """The simulated device never waits by itself: its threads do."""
    module, waited = extension(), iter((0.0, *itertools.accumulate(waits)))
    found = module.statistics

    def statistics():
        return {**found(), "stream_waited_seconds": next(waited), "plans_made": 0, "reclaims": 0, "fits": 0}

    plain = Training()
    expected = [plain.step() for _ in range(4)], plain.result()
    with lms.enable(limit="1GiB", min_size=SMALL):
        training = Training()
        monkeypatch.setattr(module, "statistics", statistics)
        losses = [training.step() for _ in range(4)]
        monkeypatch.setattr(module, "statistics", found)
        status = _core.query_tag(TAG)
        assert status.host_bytes == (status.resident_bytes if stay == "host" else 0)
        assert (lms.stats()["streamed_bytes"] > 0) == (stay == "host")
        assert (losses, training.result()) == expected
