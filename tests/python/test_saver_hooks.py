"""saver.on: hooks around operations."""

import pytest

torch = pytest.importorskip("torch")

from ebbtide.errors import StateError, StoreError  # noqa: E402
from ebbtide.saver import hooks  # noqa: E402


@pytest.fixture(autouse=True)
def no_hook_is_left():
    yield
    assert hooks._hooks == []


@pytest.fixture
def log(saver, tag):
    """A list that every hook of `tag` writes to, with whether the tag was away then."""
    entries = []

    def note(event):
        return lambda name: entries.append((event, name, saver.is_paused(name)))

    removers = [saver.on(event, tag, note(event)) for event in hooks.EVENTS]
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
    assert [event for event, *_ in log] == list(hooks.EVENTS)
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


def test_after_hooks_do_not_run_where_the_operation_fails(saver, tag, log):
    keep = block(saver, tag)
    saver.configure(host_limit=1)
    with pytest.raises(StoreError):
        saver.pause(tag)
    assert [event for event, *_ in log] == ["before_pause"]
    assert float(keep[0]) == 1


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
