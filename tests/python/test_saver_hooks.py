"""saver.on: hooks that run before and after operations."""

import pytest

torch = pytest.importorskip("torch")

from ebbtide import _core  # noqa: E402
from ebbtide.errors import DriverError, OutOfMemoryError, StateError, StoreError  # noqa: E402
from ebbtide.saver.state import hooks  # noqa: E402

UNKNOWN = 999


@pytest.fixture(autouse=True)
def no_hook_is_left():
    yield
    assert not hooks._hooks


@pytest.fixture
def sim():
    from core_sim import Sim

    made = Sim()
    yield made
    made.clear_failures()


@pytest.fixture
def log(saver, tag):
    """A list to which every hook of `tag` adds its event, and whether the tag was paused at the time."""
    entries = []

    def note(event):
        return lambda name: entries.append((event, name, saver.is_paused(name)))

    removers = [saver.on(event, tag, note(event)) for event in hooks.AROUND]
    yield entries
    for remove in removers:
        remove()


def block(saver, tag, value=1.0):
    with saver.region(tag):
        return torch.full((500_000,), value, device=saver.device)


def test_hooks_run_around_operations_in_order(saver, tag, log):
    keep = block(saver, tag)
    saver.pause(tag)
    saver.resume()
    assert log == [
        ("before_pause", tag, False),
        ("after_pause", tag, True),
        ("before_resume", tag, True),
        ("after_resume", tag, False),
    ]
    assert float(keep[0]) == 1


def test_hooks_run_only_where_something_moves(saver, tag, tag2, log):
    with saver.region(tag):
        pass
    other = block(saver, tag2)
    saver.pause(tag)
    saver.pause(tag2)
    saver.resume(tag, tag2)
    assert log == []
    keep = block(saver, tag)
    saver.pause()
    saver.pause()
    saver.resume(tag)
    saver.resume(tag)
    assert [event for event, *_ in log] == list(hooks.AROUND)
    saver.resume()
    assert float(keep[0] + other[0]) == 2


def test_hooks_of_every_tag_and_of_several(saver, tag, tag2):
    keep, seen = [block(saver, tag), block(saver, tag2)], []
    removers = [
        saver.on("before_pause", "*", lambda name: seen.append(("*", name))),
        saver.on("before_pause", tag, lambda name: seen.append(("own", name))),
    ]
    saver.pause(tag2, tag)
    for remove in removers:
        remove()
        remove()
    saver.resume(tag, tag2)
    saver.pause(tag)
    assert seen == [("*", tag2), ("*", tag), ("own", tag)]
    del keep


def test_a_hook_may_be_there_before_its_tag(saver, tag):
    seen = []
    remove = saver.on("after_pause", tag, seen.append)
    keep = block(saver, tag)
    saver.pause(tag)
    remove()
    assert seen == [tag]
    del keep


def test_a_before_hook_that_raises_stops_the_operation(saver, tag, log):
    keep = block(saver, tag)

    def fail(name):
        raise KeyError(name)

    remove = saver.on("before_pause", tag, fail)
    with pytest.raises(KeyError, match=tag):
        saver.pause(tag)
    assert not saver.is_paused(tag)
    assert float(keep.sum()) == 500_000
    remove()
    saver.pause(tag)
    remove = saver.on("before_resume", tag, fail)
    with pytest.raises(KeyError):
        saver.resume(tag)
    assert saver.is_paused(tag)
    remove()
    saver.resume(tag)
    assert float(keep.sum()) == 500_000
    assert "after_pause" in [event for event, *_ in log]


def test_an_after_hook_that_raises_arrives_when_all_is_done(saver, tag):
    keep, seen = block(saver, tag), []

    def fail(name):
        raise KeyError("first")

    def fail_too(name):
        raise ValueError("second")

    removers = [saver.on("after_pause", tag, function) for function in (fail, fail_too, seen.append)]
    removers += [saver.on("after_resume", tag, function) for function in (fail, seen.append)]
    with pytest.raises(KeyError, match="first"):
        saver.pause(tag)
    assert saver.is_paused(tag)
    with pytest.raises(KeyError):
        saver.resume(tag)
    assert not saver.is_paused(tag)
    assert seen == [tag, tag]
    assert float(keep.sum()) == 500_000
    for remove in removers:
        remove()


def test_no_hook_runs_for_an_operation_that_is_refused_at_once(saver, tag, tag2, log):
    keep = block(saver, tag)
    with saver.region(tag):
        with pytest.raises(StateError):
            saver.pause(tag)
    with pytest.raises(StateError):
        saver.pause(tag, tag2)
    assert log == []
    assert float(keep[0]) == 1


def test_a_refused_pause_is_answered_by_after_resume(saver, tag, log):
    keep = block(saver, tag)
    saver.configure(host_limit=1)
    with pytest.raises(StoreError):
        saver.pause(tag)
    assert log == [("before_pause", tag, False), ("after_resume", tag, False)]
    assert float(keep[0]) == 1


@pytest.mark.parametrize("wait", [True, False])
def test_a_refused_resume_is_answered_by_after_pause(saver, tag, log, wait):
    keep = block(saver, tag)
    saver.pause(tag)
    log.clear()
    saver.configure(device_limit=1)
    with pytest.raises(OutOfMemoryError):
        saver.resume(tag, wait=wait)
    assert log == [("before_resume", tag, True), ("after_pause", tag, True)]
    saver.configure(device_limit=None)
    saver.resume(tag)
    assert float(keep[0]) == 1


def test_a_refused_swap_answers_both_sides(saver, tag, tag2, log):
    keep = [block(saver, tag), block(saver, tag2)]
    saver.pause(tag2)
    remove = [saver.on(event, tag2, lambda name, event=event: log.append((event, name))) for event in hooks.AROUND]
    saver.configure(host_limit=1)
    with pytest.raises(StoreError):
        saver.swap(pause=tag, resume=tag2)
    assert [entry[:2] for entry in log] == [
        ("before_pause", tag),
        ("before_resume", tag2),
        ("after_resume", tag),
        ("after_pause", tag2),
    ]
    for one in remove:
        one()
    saver.configure(host_limit=None)
    saver.resume(tag2)
    assert all(float(t[0]) == 1 for t in keep)


@pytest.mark.sim_only
def test_a_tag_that_is_left_midway_is_answered_by_what_finishes_it(saver, tag, tag2, log, sim):
    keep = [block(saver, tag), block(saver, tag, 2.0), block(saver, tag2)]
    keep += [block(saver, tag) for _ in range(30)]  # several segments
    remove = saver.on("after_resume", tag2, lambda name: log.append(("after_resume", name)))
    other = saver.on("before_pause", tag2, lambda name: None)
    sim.fail("cuMemUnmap", 2, UNKNOWN)
    with pytest.raises(DriverError):
        saver.pause(tag, tag2)
    sim.clear_failures()
    assert saver.tags()[tag].state == "partial"
    assert [entry[:2] for entry in log] == [("before_pause", tag), ("after_resume", tag2)]
    saver.pause(tag)
    saver.resume(tag)
    assert [event for event, *_ in log[2:]] == list(hooks.AROUND)
    remove()
    other()
    assert [float(t[0]) for t in keep[:3]] == [1, 2, 1]


def test_a_before_hook_that_raises_answers_the_tags_that_it_reached(saver, tag, tag2, log):
    keep = [block(saver, tag), block(saver, tag2)]

    def fail(name):
        raise KeyError(name)

    remove = saver.on("before_pause", tag2, fail)
    with pytest.raises(KeyError):
        saver.pause(tag, tag2)
    assert [event for event, *_ in log] == ["before_pause", "after_resume"]
    with pytest.raises(KeyError):
        saver.pause(tag2, tag)
    assert len(log) == 2  # the before-hooks of this call were not reached
    remove()
    assert all(float(t[0]) == 1 for t in keep)


def test_what_a_hook_raises_after_a_failure_is_a_warning(saver, tag):
    keep = block(saver, tag)

    def fail(name):
        raise KeyError(name)

    seen = []
    removers = [saver.on("after_resume", tag, fail), saver.on("after_resume", tag, seen.append)]
    saver.configure(host_limit=1)
    with pytest.raises(StoreError):
        saver.pause(tag)
    assert seen == [], "no before-hook, no answer"
    removers.append(saver.on("before_pause", tag, lambda name: None))
    with pytest.warns(RuntimeWarning, match="after_resume hook"), pytest.raises(StoreError):
        saver.pause(tag)
    for remove in removers:
        remove()
    assert seen == [tag]
    assert float(keep[0]) == 1


def test_no_hook_runs_for_a_resume_that_only_waits_for_another(saver, tag, log):
    keep = block(saver, tag)
    saver.pause(tag)
    log.clear()
    _core.resume_async([tag])
    saver.resume(tag)
    assert log == []
    assert float(keep[0]) == 1


def test_no_hook_runs_at_the_end_of_paused_where_nothing_comes_back(saver, tag, log):
    keep = block(saver, tag)
    saver.pause(tag)
    gone = block(saver, tag)
    with saver.paused(tag):
        log.clear()
        del gone
        saver.trim(tag)
    assert log == []
    assert saver.is_paused(tag)
    saver.resume(tag)
    assert float(keep[0]) == 1


def test_a_hook_may_use_the_tag(saver, tag):
    """Nothing is held while it runs: it allocates, frees, promotes, reads and writes the stored bytes."""
    keep, gone, made = block(saver, tag), [block(saver, tag)], []

    def before_pause(_):
        gone.clear()
        made.append(block(saver, tag, 2.0))
        saver.promote(tag)
        saver.trim(tag)

    def before_resume(_):
        saver.backup_of(keep)[0] = 3
        saver.prepare(tag)

    removers = [saver.on("before_pause", tag, before_pause), saver.on("before_resume", tag, before_resume)]
    saver.pause(tag)
    assert saver.tags()[tag].resident_bytes == 0
    saver.resume(tag)
    assert [float(keep[0]), float(keep[1]), float(made[0][0])] == [3, 1, 2]
    for remove in removers:
        remove()


def test_a_hook_may_use_ebbtide(saver, tag, tag2):
    keep = [block(saver, tag), block(saver, tag2)]
    removers = [
        saver.on("before_pause", tag, lambda _: saver.pause(tag2)),
        saver.on("after_resume", tag, lambda _: saver.resume(tag2)),
    ]
    saver.pause(tag)
    assert saver.is_paused(tag2)
    saver.resume(tag)
    assert not saver.is_paused(tag2)
    assert all(float(t[0]) == 1 for t in keep)
    for remove in removers:
        remove()
