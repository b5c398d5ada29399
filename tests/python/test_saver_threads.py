"""Several threads in regions, and regions that take the allocations of all threads."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")

from ebbtide import _core  # noqa: E402
from ebbtide.errors import StateError  # noqa: E402


def tag_of(tensor):
    info = _core.find(tensor.data_ptr())
    return None if info is None else info.tag


def in_thread(function):
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(function).result(60)


def test_a_region_takes_its_own_threads_allocations_only(saver, tag):
    with saver.region(tag):
        other = in_thread(lambda: torch.ones(10, device=saver.device))
    assert tag_of(other) is None


def test_one_region_object_in_eight_threads(saver, tag, tag2):
    scope, inner = saver.region(tag), saver.region(tag2)
    barrier = threading.Barrier(8)

    def work(number):
        barrier.wait(30)
        found = set()
        for size in range(1, 40):
            with scope:
                outer = torch.full((size * 100,), float(number), device=saver.device)
                with inner:
                    nested = torch.full((size * 100,), float(number), device=saver.device)
            plain = torch.full((size * 100,), float(number), device=saver.device)
            assert float(outer.sum()) == float(nested.sum()) == float(plain.sum()) == number * size * 100
            found.add((tag_of(outer), tag_of(nested), tag_of(plain)))
        return found

    with ThreadPoolExecutor(8) as executor:
        assert set().union(*executor.map(work, range(8))) == {(tag, tag2, None)}
    assert saver.tags()[tag].lease_count == 0


def test_threads_all_takes_every_threads_allocations(saver, tag):
    with saver.region(tag, threads="all"):
        mine = torch.ones(10, device=saver.device)
        other = in_thread(lambda: torch.ones(10, device=saver.device))
    after = in_thread(lambda: torch.ones(10, device=saver.device))
    assert (tag_of(mine), tag_of(other), tag_of(after)) == (tag, tag, None)


def test_threads_all_takes_the_gradients_of_backward(saver, tag):
    parameter = torch.nn.Parameter(torch.ones(1000, device=saver.device))
    with saver.region(tag, threads="all"):
        (parameter * 2).sum().backward()
    assert tag_of(parameter.grad) == tag


def test_an_inner_region_wins_over_threads_all_for_its_thread(saver, tag, tag2):
    with saver.region(tag, threads="all"):
        with saver.region(tag2):
            inner = torch.ones(10, device=saver.device)
        back = torch.ones(10, device=saver.device)
        other = in_thread(lambda: torch.ones(10, device=saver.device))
    assert (tag_of(inner), tag_of(back), tag_of(other)) == (tag2, tag, tag)


def test_threads_all_inside_a_region(saver, tag, tag2):
    with saver.region(tag):
        with saver.region(tag2, threads="all"):
            inner = torch.ones(10, device=saver.device)
            other = in_thread(lambda: torch.ones(10, device=saver.device))
        back = torch.ones(10, device=saver.device)
    assert (tag_of(inner), tag_of(other), tag_of(back)) == (tag2, tag2, tag)


def test_disabled_inside_threads_all(saver, tag):
    with saver.region(tag, threads="all"):
        with saver.disabled():
            plain = torch.ones(10, device=saver.device)
        back = torch.ones(10, device=saver.device)
    assert (tag_of(plain), tag_of(back)) == (None, tag)


def test_a_region_is_left_by_the_thread_that_entered_it(saver, tag):
    scope = saver.region(tag)
    scope.__enter__()
    try:
        with pytest.raises(StateError, match="in the thread that entered it"):
            in_thread(lambda: scope.__exit__(None, None, None))
    finally:
        scope.__exit__(None, None, None)
    saver.pause(tag)


def test_a_thread_that_ends_inside_a_region_gives_it_back(saver, tag, tag2):
    def end_inside():
        saver.region(tag).__enter__()
        saver.region(tag2, threads="all").__enter__()
        saver.disabled().__enter__()

    thread = threading.Thread(target=end_inside)
    thread.start()
    thread.join()
    assert [saver.tags()[name].lease_count for name in (tag, tag2)] == [0, 0]
    saver.pause(tag, tag2)
    assert tag_of(in_thread(lambda: torch.ones(10, device=saver.device))) is None


def test_allocation_and_frees_beside_pause_and_resume(saver, tag, tag2):
    """Threads work in one tag while another tag is paused and resumed, and free memory of the paused tag."""
    with saver.region(tag):
        keep = [torch.full((200_000,), float(i), device=saver.device) for i in range(8)]
        doomed = [torch.ones(50_000, device=saver.device) for _ in range(64)]
    stop = threading.Event()

    def churn(number):
        count = 0
        while not stop.is_set() or count < 5:
            with saver.region(tag2):
                tensor = torch.full((10_000 + 1000 * number,), float(number), device=saver.device)
            assert float(tensor.sum()) == number * tensor.numel()
            if doomed:
                try:
                    doomed.pop()
                except IndexError:
                    pass
            count += 1

    with ThreadPoolExecutor(4) as executor:
        workers = [executor.submit(churn, number) for number in range(4)]
        for _ in range(10):
            saver.pause(tag)
            saver.resume(tag)
        stop.set()
        for worker in workers:
            worker.result(60)
    assert [float(t[-1]) for t in keep] == [float(i) for i in range(8)]


def test_entering_a_tag_that_is_paused_and_resumed_by_others(saver, tag):
    """A thread that leases a pool while the tag is paused and resumed gets resident memory. A pause that meets a lease
    is a StateError and nothing else."""
    stop = threading.Event()
    refused = []

    def enter(number):
        for _ in range(60):
            with saver.region(tag):
                tensor = torch.full((5000,), float(number), device=saver.device)
                assert float(tensor.sum()) == number * 5000

    def cycle():
        while not stop.is_set():
            try:
                saver.pause(tag)
                saver.resume(tag)
            except StateError as error:
                refused.append(error)
                stop.wait(0.001)

    with saver.region(tag):
        keep = torch.full((5000,), 9.0, device=saver.device)
    with ThreadPoolExecutor(4) as executor:
        workers = [executor.submit(enter, number) for number in range(3)]
        cycler = executor.submit(cycle)
        for worker in workers:
            worker.result(120)
        stop.set()
        cycler.result(60)
    saver.resume(tag)
    assert float(keep.sum()) == 45_000
    assert all("thread" in str(error) for error in refused)


class Thread:
    """Executes the functions that it is given. Its regions belong to it."""

    def __init__(self):
        self._executor = ThreadPoolExecutor(1)

    def __call__(self, function):
        return self._executor.submit(function).result(240)


@pytest.mark.sim_only  # on a GPU, it depends on torch's version
@pytest.mark.parametrize("is_own_first", [True, False])
def test_a_threads_own_region_goes_before_one_for_all(saver, tag, tag2, is_own_first):
    own, for_all, other = saver.region(tag2), saver.region(tag, threads="all"), Thread()
    if is_own_first:
        other(own.__enter__)
    with for_all:
        if not is_own_first:
            other(own.__enter__)
        made = other(lambda: torch.ones(10, device=saver.device))
        other(lambda: own.__exit__(None, None, None))
        after = other(lambda: torch.ones(10, device=saver.device))
    assert (tag_of(made), tag_of(after)) == (tag2, tag)


@pytest.mark.sim_only  # on a GPU, it depends on torch's version
def test_a_region_for_all_that_rested_is_the_newest_afterwards(saver, tag, tag2):
    other, made = Thread(), []

    def look():
        made.append(tag_of(in_thread(lambda: torch.ones(10, device=saver.device))))

    inner = saver.region(tag2, threads="all")
    with saver.region(tag, threads="all"):
        other(inner.__enter__)
        look()
        with saver.disabled():
            look()
        look()
        other(lambda: inner.__exit__(None, None, None))
    assert made == [tag2, tag2, tag]
