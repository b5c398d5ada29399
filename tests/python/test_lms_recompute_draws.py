"""Whether Python's and NumPy's random numbers were drawn, and the same numbers again."""

import random
import sys
from collections.abc import Callable
from typing import Any

import pytest
from ebbtide.lms.recompute import global_states
from ebbtide.lms.recompute.global_states import OtherRandomStates

numpy: Any = pytest.importorskip("numpy.random")

# Each second number of a normal distribution was computed along with the first, and moves no generator.
DRAWS: dict[str, Callable[[], Any]] = {
    "random": random.random,
    "gauss": lambda: random.gauss(0, 1),
    "shuffle": lambda: random.shuffle([1, 2, 3]),
    "rand": numpy.rand,
    "randn": numpy.randn,
    "permutation": lambda: numpy.permutation(4).tolist(),
}


@pytest.fixture(autouse=True)
def seeds() -> None:
    random.seed(1)
    numpy.seed(1)


@pytest.fixture(params=["memory", "state"])
def told_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """state: nothing is known of the memory of generators, as in a Python that is not CPython."""
    if request.param == "state":
        monkeypatch.setattr(sys.implementation, "name", "another")


@pytest.mark.usefixtures("told_by")
@pytest.mark.parametrize("name", DRAWS)
def test_each_draw_is_seen_and_can_be_repeated(name: str) -> None:
    for _ in range(4):
        assert not OtherRandomStates().have_moved()
        before = OtherRandomStates()
        drawn = DRAWS[name]()
        assert before.have_moved()
        after = DRAWS[name](), random.getstate(), str(numpy.get_state())
        random.setstate(before._python)
        numpy.set_state(before._numpy)
        assert DRAWS[name]() == drawn
        assert (DRAWS[name](), random.getstate(), str(numpy.get_state())) == after


@pytest.mark.usefixtures("told_by")
@pytest.mark.parametrize("name", DRAWS)
def test_what_is_drawn_again_changes_nothing_that_is_drawn_later(name: str) -> None:
    before = OtherRandomStates()
    drawn = [DRAWS[name]() for _ in range(3)]
    now = OtherRandomStates()
    with before.again():
        assert [DRAWS[name]() for _ in range(3)] == drawn
    assert not now.have_moved()


@pytest.mark.usefixtures("told_by")
def test_a_seed_is_a_draw_unless_it_is_the_one_before() -> None:
    before = OtherRandomStates()
    numpy.seed(1)
    random.seed(1)
    assert not before.have_moved()
    numpy.seed(2)
    assert before.have_moved()


def test_a_state_is_read_once_as_long_as_nobody_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    for generator in (global_states._of_python, global_states._of_numpy):
        read = generator._read
        monkeypatch.setattr(generator, "_read", lambda read=read: (reads.append(1), read())[1])
    OtherRandomStates()
    reads.clear()
    for _ in range(3):
        assert not OtherRandomStates().have_moved()
    assert not reads
    random.random()
    OtherRandomStates()
    assert len(reads) == 1


def test_a_state_that_another_thread_moves_meanwhile_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = global_states._of_python
    read = generator._read

    def read_late() -> Any:
        random.random()
        return read()

    random.random()
    before = random.getstate()
    with monkeypatch.context() as patch:
        patch.setattr(generator, "_read", read_late)
        generator.state()
    random.setstate(before)
    assert generator.state() == before


def test_generators_of_the_program_in_the_place_of_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counts(random.Random):
        count = 0

        def random(self) -> float:
            self.count += 1
            return 0.5

        def getstate(self) -> Any:
            return self.count

    mine, other = Counts(), numpy.RandomState(5)
    monkeypatch.setattr(random, "getstate", mine.getstate)
    before = OtherRandomStates()
    mine.random()
    assert before.have_moved()
    monkeypatch.setattr(numpy, "get_state", other.get_state)
    before = OtherRandomStates()
    assert not before.have_moved()
    other.rand()
    assert before.have_moved()


@pytest.mark.skipif(not hasattr(numpy, "set_bit_generator"), reason="this NumPy can't change its generator")
def test_numpy_may_have_another_kind_of_generator() -> None:
    mine = numpy.get_bit_generator()
    numpy.set_bit_generator(numpy.PCG64(1))
    try:
        before = OtherRandomStates()
        assert not before.have_moved()
        drawn = numpy.rand()
        assert before.have_moved()
        with before.again():
            assert numpy.rand() == drawn
    finally:
        numpy.set_bit_generator(mine)
