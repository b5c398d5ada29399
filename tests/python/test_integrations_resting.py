"""The common part of the callbacks of trainers: adopting, resting and coming back. Without those packages."""

import pytest

torch = pytest.importorskip("torch")

from ebbtide import _core  # noqa: E402
from ebbtide.errors import OutOfMemoryError, StateError, StoreError  # noqa: E402
from ebbtide.integrations.resting import Resting, states_of  # noqa: E402

pytestmark = pytest.mark.usefixtures("quick_scans")

MIB = 1 << 20


@pytest.fixture
def trained(saver):
    """A model and an optimizer that has made its states."""
    model = torch.nn.Linear(1024, 1024, device=saver.device)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 1024, device=saver.device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def copy_of(model, optimizer):
    tensors = [*model.parameters(), *(value for state in states_of(optimizer) for value in state.values())]
    return [tensor.detach().clone() for tensor in tensors]


def is_same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_the_states_leave_and_the_model_stays(saver, tag, tag2, trained):
    model, optimizer = trained
    before = copy_of(model, optimizer)
    resting = Resting(tag, tag2, [tag2], "ram")
    resting.adopt_model(model)
    with resting.phase([optimizer]):
        assert saver.is_paused(tag2) and not saver.is_paused(tag)
        assert saver.tags()[tag2].resident_bytes == 0
        model(torch.ones(2, 1024, device=saver.device))
    assert is_same(copy_of(model, optimizer), before)
    assert saver.tags()[tag].size_bytes >= model.weight.nbytes


def test_states_that_came_later_are_adopted_at_the_next_phase(saver, tag, tag2):
    model = torch.nn.Linear(1024, 1024, device=saver.device)
    optimizer = torch.optim.AdamW(model.parameters())
    resting = Resting(tag, tag2, [tag2], "ram")
    resting.adopt_model(model)
    with resting.phase([optimizer]):
        assert tag2 in saver.tags() and saver.tags()[tag2].size_bytes == 0
    model(torch.ones(2, 1024, device=saver.device)).sum().backward()
    optimizer.step()
    with resting.phase([optimizer]):
        assert saver.tags()[tag2].stored_bytes >= 2 * model.weight.nbytes


def test_what_was_paused_before_stays_paused(saver, tag, tag2, trained):
    resting = Resting(tag, tag2, [tag2], "ram")
    with resting.phase([trained[1]]):
        pass
    saver.pause(tag2)
    resting_elsewhere = Resting(None, None, [tag2], "ram")
    with resting_elsewhere.phase([]):
        pass
    assert saver.is_paused(tag2)


def test_a_phase_inside_a_phase_ends_nothing(saver, tag, tag2, trained):
    resting = Resting(None, tag2, [tag2], "ram")
    with resting.phase([trained[1]]):
        with resting.phase([trained[1]]):
            assert saver.is_paused(tag2)
        assert saver.is_paused(tag2)
    assert not saver.is_paused(tag2)


def test_a_phase_inside_a_phase_brings_back_what_the_program_brought_back_between(saver, tag, tag2, trained):
    resting = Resting(None, tag2, [tag2], "ram")
    with resting.phase([trained[1]]):
        saver.resume(tag2)
        with resting.phase([trained[1]]):
            assert saver.is_paused(tag2)
        assert not saver.is_paused(tag2)


def test_a_phase_that_raises_brings_everything_back(saver, tag2, trained):
    resting = Resting(None, tag2, [tag2], "ram")
    with pytest.raises(ValueError, match="planted"), resting.phase([trained[1]]):
        raise ValueError("planted")
    assert not saver.is_paused(tag2)


def test_an_end_without_room_can_be_repeated(saver, tag2, trained):
    saver.trim()  # what other tests have cached would make room
    before = copy_of(*trained)
    resting = Resting(None, tag2, [tag2], "ram")
    resting.begin([trained[1]])
    saver.configure(device_limit=_core.query_device(0).held_bytes + MIB)
    with pytest.raises(OutOfMemoryError):
        resting.end()
    saver.configure(device_limit=None)
    resting.end()
    assert is_same(copy_of(*trained), before)


def test_a_pause_that_fails_leaves_nothing_away(saver, tag2, trained):
    resting = Resting(None, tag2, [tag2], "ram")
    with resting.phase([trained[1]]):
        pass
    with saver.region(tag2), pytest.raises(StateError):
        resting.begin([])
    resting.end()
    assert not saver.is_paused(tag2)


def test_the_phase_after_one_whose_pause_failed_pauses(saver, tag2, trained):
    resting = Resting(None, tag2, [tag2], "ram")
    with resting.phase([trained[1]]):
        pass
    saver.configure(host_limit=1)
    with pytest.raises(StoreError), resting.phase([trained[1]]):
        pytest.fail("the phase has begun")
    assert not saver.is_paused(tag2)
    saver.configure(host_limit=None)
    with resting.phase([trained[1]]):
        assert saver.is_paused(tag2)
    assert not saver.is_paused(tag2)


def test_the_phase_after_one_whose_resume_failed_brings_everything_back(saver, tag2, trained):
    saver.trim()  # what other tests have cached would make room
    before = copy_of(*trained)
    resting = Resting(None, tag2, [tag2], "ram")
    with pytest.raises(OutOfMemoryError), resting.phase([trained[1]]):
        saver.configure(device_limit=_core.query_device(0).held_bytes + MIB)
    assert saver.is_paused(tag2)
    saver.configure(device_limit=None)
    with resting.phase([trained[1]]):
        assert saver.is_paused(tag2)
    assert not saver.is_paused(tag2) and is_same(copy_of(*trained), before)


def test_after_a_resume_by_hand_the_next_phase_pauses(saver, tag2, trained):
    resting = Resting(None, tag2, [tag2], "ram")
    resting.begin([trained[1]])
    saver.resume(tag2)
    with resting.phase([trained[1]]):
        assert saver.is_paused(tag2)
    assert not saver.is_paused(tag2)
    resting.begin([trained[1]])
    saver.resume(tag2)
    resting.begin([trained[1]])
    assert saver.is_paused(tag2)
    resting.end()
    assert not saver.is_paused(tag2)


def test_a_phase_leaves_away_what_an_event_took_before_it(saver, tag2, trained):
    resting = Resting(None, tag2, [tag2], "ram")
    resting.begin([trained[1]])
    with resting.phase([trained[1]]):
        assert saver.is_paused(tag2)
    assert saver.is_paused(tag2)
    resting.end()
    assert not saver.is_paused(tag2)


def test_an_unknown_tag_is_skipped(saver, tag):
    resting = Resting(None, None, [tag], "ram")
    with resting.phase([]):
        assert tag not in saver.tags()


def test_tensors_that_stay_outside_are_logged(saver, tag, caplog):
    resting = Resting(tag, None, [tag], "ram")
    model = torch.nn.Linear(3, 3, device="meta")
    with caplog.at_level("INFO"):
        resting.adopt_model(model)
    assert "2 tensors stay outside" in caplog.text


@pytest.mark.parametrize(
    "wrong",
    [
        {"model_tag": "a/b"},
        {"optimizer_tag": 3},
        {"pause": ()},
        {"pause": [3]},
        {"backup": "tape"},
        {"backup": None},
    ],
)
def test_malformed_arguments_are_refused(wrong):
    arguments = {"model_tag": "m", "optimizer_tag": "o", "pause": ["o"], "backup": "ram"}
    with pytest.raises((TypeError, ValueError)):
        Resting(**{**arguments, **wrong})


def test_the_tag_of_the_optimizer_rests_where_pause_names_none(saver, tag, tag2, trained):
    with Resting(tag, tag2, None, "ram").phase([trained[1]]):
        assert saver.is_paused(tag2)
    with pytest.raises(ValueError, match="without an optimizer_tag, pause names"):
        Resting(tag, None, None, "ram")


def test_one_tag_may_be_a_string(saver, tag):
    with Resting(None, None, tag, "ram").phase([]):
        pass
