"""Closing `with` blocks: repeatedly under interrupts, from another thread, and when they are dropped."""

import contextlib
import gc
import sys
import threading
import weakref

import pytest

torch = pytest.importorskip("torch")

from ebbtide import _core  # noqa: E402
from ebbtide.errors import StateError  # noqa: E402
from interrupts import Planted  # noqa: E402
from test_saver_interrupts import assert_outside, make, tag_of  # noqa: E402


class Steps(_core.Scope):
    def __init__(self, *raises, failure=None):
        self.raises, self.failure = list(raises), failure
        self.closes = 0
        self.seen = None

    def _open(self):
        return self

    def _close(self):
        self.closes += 1
        self.seen = self._failure
        if self.raises:
            raise self.raises.pop(0)
        return self.failure


def test_a_scope_closes_until_it_is_done():
    scope = Steps(Planted("first"), Planted("second"))
    with pytest.raises(Planted, match="first"):
        with scope:
            pass
    assert scope.closes == 3
    scope = Steps(failure=ValueError("its own"))
    with pytest.raises(ValueError, match="its own"):
        with scope:
            raise KeyError("body")
    assert isinstance(scope.seen, KeyError) and scope.closes == 1
    scope = Steps(Planted("first"), failure=ValueError("its own"))
    with pytest.raises(Planted) as caught, scope:
        pass
    assert isinstance(caught.value.__context__, ValueError)
    endless = Steps(*[Planted()] * 5000)
    with pytest.raises(Planted), endless:
        pass
    assert endless.closes == 100
    with pytest.raises(StateError, match="not open"):
        endless.__exit__(None, None, None)
    with pytest.raises(StateError, match="entered once"):
        endless.__enter__()
    dropped = []

    class Dropped(Steps):
        def _close(self):
            dropped.append(type(self._failure))

    Dropped().__enter__()
    gc.collect()
    assert dropped == [GeneratorExit]
    kept = Dropped()
    leave = kept.__exit__
    kept.__enter__()
    del leave
    assert dropped == [GeneratorExit] * 2, "also while something refers to it"


def test_an_exit_that_was_looked_up_closes_its_region_when_it_dies(saver, tag):
    """Python 3.14 calls __enter__ by a plain CALL. An exception after it leaves the block unprotected: only the
    __exit__ that was looked up before remains."""
    region = saver.region(tag)
    leave = region.__exit__
    region.__enter__()
    assert tag_of(make(saver)) == tag
    del leave
    assert_outside(saver, tag)
    leave = region.__exit__
    with region:  # of another `with`
        leave2 = region.__exit__
        del leave, leave2
        assert tag_of(make(saver)) == tag
    with contextlib.ExitStack() as stack:
        stack.enter_context(region)
        stack.enter_context(region)
        assert tag_of(make(saver)) == tag
    assert_outside(saver, tag)


def collect_elsewhere(holder):
    thread = threading.Thread(target=holder.clear)
    thread.start()
    thread.join(30)


def test_a_generator_that_is_collected_in_another_thread_leaves_its_region(saver, tag):
    def inside():
        with saver.region(tag):
            yield make(saver)

    holder = [inside()]
    assert tag_of(next(holder[0])) == tag
    assert tag_of(make(saver)) == tag
    collect_elsewhere(holder)
    assert saver.tags()[tag].lease_count == 0
    assert tag_of(make(saver)) is None
    assert_outside(saver, tag)


def test_each_generator_closes_its_own_frame_of_a_shared_region(saver, tag, tag2):
    region = saver.region(tag)

    def inside():
        with region:
            yield

    first, second = inside(), inside()
    next(first)
    with saver.region(tag2):
        next(second)
        first.close()  # not the innermost one
        assert tag_of(make(saver)) == tag
        second.close()
        assert tag_of(make(saver)) == tag2
    assert_outside(saver, tag, tag2)


def test_what_another_thread_entered_is_said_to_be(saver, tag):
    region = saver.region(tag)
    errors = []

    def leave():
        try:
            region.__exit__(None, None, None)
        except StateError as error:
            errors.append(str(error))

    with region:
        thread = threading.Thread(target=leave)
        thread.start()
        thread.join(30)
        assert tag_of(make(saver)) == tag
    leave()
    assert "another thread entered this" in errors[0]
    assert "another thread" not in errors[1] and "left already" in errors[1]


def test_a_suspension_that_is_collected_in_another_thread_ends(saver, tag):
    def inside():
        with saver.disabled():
            yield

    with saver.region(tag):
        holder = [inside()]
        next(holder[0])
        assert tag_of(make(saver)) is None
        collect_elsewhere(holder)
        with saver.region(tag):
            pass  # from here on torch uses this thread's region again
        assert tag_of(make(saver)) == tag
    assert_outside(saver, tag)


def test_a_thread_that_ends_inside_leaves_everything(saver, tag, tag2):
    scopes = [saver.region(tag), saver.disabled(), saver.region(tag2, threads="all")]

    def enter():
        for scope in scopes:
            scope.__enter__()
        assert tag_of(make(saver)) == tag2

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join(30)
    assert_outside(saver, tag, tag2)


def test_a_region_that_waits_in_a_decorated_generator_is_not_open(saver, tag):
    @saver.region(tag)
    def steps():
        yield make(saver)
        yield make(saver)

    holder = [steps()]
    assert tag_of(next(holder[0])) == tag
    assert saver.tags()[tag].lease_count == 0
    collect_elsewhere(holder)
    assert_outside(saver, tag)


@pytest.mark.parametrize("how", ["close", "collect"])
def test_a_decorated_generator_ends_where_its_region_cannot_be_entered(saver, tag, how):
    saver.trim()  # what other tests have cached would make room
    ends = []

    @saver.region(tag)
    def steps():
        try:
            yield make(saver)
        finally:
            ends.append(tag_of(make(saver)))

    holder = [steps()]
    assert tag_of(next(holder[0])) == tag
    gc.collect()
    saver.trim(tag)  # the segments of tensors that died here
    assert saver.tags()[tag].trimmed_bytes > 0
    ordinary = make(saver)  # leaves free memory outside regions in torch's cache
    saver.configure(device_limit=_core.query_device(0).held_bytes)
    try:
        with pytest.raises(torch.OutOfMemoryError), saver.region(tag):
            raise AssertionError("entered")
        if how == "close":
            holder[0].close()
        with no_unraisable():
            holder.clear()
            gc.collect()
    finally:
        saver.configure(device_limit=None)
    assert ends == [None]
    del ordinary
    assert_outside(saver, tag)


def test_a_decorated_generator_keeps_nothing_that_it_has_passed_on(saver, tag):
    @saver.region(tag)
    def steps():
        while True:
            yield make(saver)

    generator = steps()
    seen = [weakref.ref(next(generator))]
    assert seen[0]() is None
    sent = make(saver)
    seen = [weakref.ref(sent), weakref.ref(generator.send(sent))]
    del sent
    assert [one() for one in seen] == [None, None]


def test_what_a_decorated_generator_raises_at_its_end_arrives(saver, tag):
    @saver.region(tag)
    def steps():
        try:
            yield
        finally:
            raise ValueError("its own")

    generator = steps()
    next(generator)
    with pytest.raises(ValueError, match="its own"):
        generator.close()
    assert_outside(saver, tag)


@contextlib.contextmanager
def no_unraisable():
    seen = []
    before, sys.unraisablehook = sys.unraisablehook, lambda what: seen.append(repr(what.exc_value))
    try:
        yield
    finally:
        sys.unraisablehook = before
    assert seen == []
