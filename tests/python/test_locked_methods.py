"""What `locked` does with the lock of an object. tests/law/test_locks.py has what may stand below a lock."""

import inspect
import threading

import pytest
from ebbtide.locks import locked, make_lock


class Counter:
    def __init__(self):
        self._lock = make_lock()
        self.count = 0

    @locked
    def add(self, by: int = 1) -> int:
        """Adds."""
        self.count += by
        return self.count

    @locked
    def add_twice(self):
        return self.add(), self.add(by=2)

    @locked
    def fail(self):
        raise ValueError

    def is_free_for_others(self):
        found = []
        thread = threading.Thread(target=lambda: found.append(self._lock.acquire(blocking=False)))
        thread.start()
        thread.join()
        return found == [True]


def test_a_locked_method_is_as_it_was_and_leaves_the_lock_free():
    counter = Counter()
    assert counter.add_twice() == (1, 3)
    assert counter.is_free_for_others()
    assert (Counter.add.__name__, Counter.add.__doc__, list(inspect.signature(counter.add).parameters)) == (
        "add",
        "Adds.",
        ["by"],
    )


def test_a_locked_method_that_fails_leaves_the_lock_free():
    counter = Counter()
    with pytest.raises(ValueError):
        counter.fail()
    assert counter.is_free_for_others()


def test_others_wait_while_a_locked_method_runs():
    counter = Counter()
    with counter._lock:
        thread = threading.Thread(target=counter.add)
        thread.start()
        thread.join(0.05)
        assert counter.count == 0
    thread.join()
    assert counter.count == 1
