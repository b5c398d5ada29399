"""Regions: the tag of an allocation, nesting, entry, and the operations that a lease forbids."""

import contextlib
import gc
import threading

import pytest

torch = pytest.importorskip("torch")

from ebbtide import _core  # noqa: E402
from ebbtide.errors import StateError  # noqa: E402

BIG = 3 << 20  # elements of float32: 12 MiB, in a segment of its own


def tag_of(tensor):
    info = _core.find(tensor.data_ptr())
    return None if info is None else info.tag


def test_a_region_gives_its_tag_and_ordinary_memory_has_none(saver, tag):
    before = torch.ones(1000, device=saver.device)
    with saver.region(tag) as scope:
        inside = torch.ones(1000, device=saver.device)
    after = torch.ones(1000, device=saver.device)
    assert (tag_of(before), tag_of(inside), tag_of(after)) == (None, tag, None)
    assert scope.tag == tag
    status = saver.tags()[tag]
    assert (status.state, status.lease_count, status.resident_bytes) == ("resident", 0, status.size_bytes)
    assert status.size_bytes >= 4000


def test_real_modules_live_in_regions(saver, tag):
    with saver.region(tag):
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 4)).to(
            saver.device
        )
    assert {tag_of(t) for t in (*model.parameters(), *model.buffers())} == {tag}
    model(torch.randn(8, 64, device=saver.device)).sum().backward()
    want = [p.detach().cpu().clone() for p in model.parameters()]
    saver.pause(tag)
    saver.resume(tag)
    assert all(torch.equal(p.detach().cpu(), w) for p, w in zip(model.parameters(), want, strict=True))
    model(torch.randn(8, 64, device=saver.device))


def test_the_inner_region_wins_and_the_outer_one_comes_back(saver, tag, tag2):
    with saver.region(tag):
        first = torch.ones(10, device=saver.device)
        with saver.region(tag2):
            second = torch.ones(10, device=saver.device)
            with saver.region(tag):
                third = torch.ones(10, device=saver.device)
            fourth = torch.ones(10, device=saver.device)
        fifth = torch.ones(10, device=saver.device)
    assert [tag_of(t) for t in (first, second, third, fourth, fifth)] == [tag, tag2, tag, tag2, tag]


def test_one_object_is_entered_again_and_inside_itself(saver, tag):
    scope = saver.region(tag)
    for _ in range(3):
        with scope, scope:
            tensor = torch.ones(10, device=saver.device)
        assert tag_of(tensor) == tag
    assert saver.tags()[tag].lease_count == 0


def test_disabled_gives_ordinary_memory_and_nests(saver, tag):
    off = saver.disabled()
    with saver.region(tag):
        with off:
            plain = torch.ones(10, device=saver.device)
            with saver.region(tag):
                inside = torch.ones(10, device=saver.device)
            with off:
                plain_again = torch.ones(10, device=saver.device)
        after = torch.ones(10, device=saver.device)
    with off:
        outside = torch.ones(10, device=saver.device)
    assert [tag_of(t) for t in (plain, inside, plain_again, after, outside)] == [None, tag, None, tag, None]


def test_both_decorate_functions(saver, tag):
    @saver.region(tag)
    def make(n, *, value):
        "doc"
        return torch.full((n,), value, device=saver.device)

    @saver.region(tag)
    @saver.disabled()
    def make_plain():
        return torch.ones(3, device=saver.device)

    assert (make.__name__, make.__doc__) == ("make", "doc")
    assert tag_of(make(5, value=2.0)) == tag
    assert tag_of(make_plain()) is None


def test_a_decorated_generator_is_inside_only_while_it_runs(saver, tag):
    log = []

    @saver.region(tag)
    def steps():
        try:
            got = yield torch.ones(10, device=saver.device)
            try:
                yield torch.full((10,), got, device=saver.device)
            except KeyError:
                yield torch.zeros(10, device=saver.device)
            return "end"
        finally:
            log.append(tag_of(torch.ones(10, device=saver.device)))

    generator = steps()
    inside = [next(generator)]
    outside = torch.ones(10, device=saver.device)
    assert saver.tags()[tag].lease_count == 0
    inside.append(generator.send(7.0))
    inside.append(generator.throw(KeyError()))
    with pytest.raises(StopIteration) as stop:
        next(generator)
    assert stop.value.value == "end"
    assert [tag_of(t) for t in inside] == [tag] * 3
    assert tag_of(outside) is None
    assert float(inside[1][0]) == 7.0
    other = steps()
    next(other)
    other.close()
    assert log == [tag, tag]
    assert saver.tags()[tag].lease_count == 0


def test_a_region_inside_a_generator_may_end_out_of_order(saver, tag, tag2):
    def with_block(name):
        with saver.region(name):
            yield torch.ones(10, device=saver.device)
            yield torch.ones(10, device=saver.device)

    first, second = with_block(tag), with_block(tag2)
    tensors = [next(first), next(second)]
    assert [tag_of(t) for t in tensors] == [tag, tag2]
    first.close()  # the outer one ends first
    assert tag_of(torch.ones(10, device=saver.device)) == tag2
    assert saver.tags()[tag].lease_count == 0
    second.close()
    assert tag_of(torch.ones(10, device=saver.device)) is None


def test_what_cannot_be_decorated_is_refused(saver, tag):
    async def later():
        pass

    async def many():
        yield 1

    for wrong in (later, many, int, 3):
        with pytest.raises(TypeError):
            saver.region(tag)(wrong)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_exception_in_the_body_closes_the_region(saver, tag, error):
    with pytest.raises(error):
        with saver.region(tag), saver.disabled(), saver.region(tag):
            raise error
    assert saver.tags()[tag].lease_count == 0
    assert tag_of(torch.ones(10, device=saver.device)) is None
    saver.pause(tag)


def test_pausing_a_leased_tag_names_the_thread_and_moves_nothing(saver, tag, tag2):
    with saver.region(tag2):
        other = torch.ones(BIG, device=saver.device)
    with saver.region(tag):
        tensor = torch.ones(BIG, device=saver.device)
        for pause in (lambda: saver.pause(tag), lambda: saver.pause(tag2, tag), saver.pause):
            with pytest.raises(StateError, match="MainThread"):
                pause()
        assert not saver.is_paused(tag)
        assert not saver.is_paused(tag2)
        assert float(other.sum()) == float(tensor.sum()) == BIG
        with saver.disabled():
            with pytest.raises(StateError, match=tag):
                saver.pause(tag)
    assert saver.pause(tag).bytes >= 4 * BIG


def test_a_tag_that_another_thread_leases_is_refused(saver, tag):
    entered, leave = threading.Event(), threading.Event()

    def hold():
        with saver.region(tag):
            entered.set()
            leave.wait(30)

    thread = threading.Thread(target=hold, name="the-holder")
    thread.start()
    try:
        assert entered.wait(30)
        with pytest.raises(StateError, match="the-holder"):
            saver.pause(tag)
    finally:
        leave.set()
        thread.join()
    saver.pause(tag)


def collect_elsewhere(generators):
    thread = threading.Thread(target=generators.clear)
    thread.start()
    thread.join()
    gc.collect()


def waits_inside(scope, inner=None):
    with scope, inner or contextlib.nullcontext():
        yield


@pytest.mark.parametrize("outer", ["none", "region", "all threads", "disabled"])
@pytest.mark.parametrize("inner", ["region", "nested", "disabled"])  # docs/limits.md has the other cases
def test_a_region_that_another_thread_ends_uncovers_the_outer_one(saver, tag, tag2, outer, inner):
    """The thread is in the outer region again at once, not only when it enters or leaves the next region."""
    saver_of = {
        "none": contextlib.nullcontext,
        "region": lambda: saver.region(tag),
        "all threads": lambda: saver.region(tag, threads="all"),
        "disabled": saver.disabled,
    }
    inside = {
        "region": lambda: [saver.region(tag2)],
        "nested": lambda: [saver.region(tag), saver.region(tag2)],
        "disabled": lambda: [saver.disabled()],
    }
    if inner == "disabled" and saver.device == "cuda" and outer in ("none", "region"):
        return  # docs/limits.md: no thread can open a pool for another one

    def here():
        return tag_of(torch.ones(10, device=saver.device))

    with saver.region(tag2):  # the outermost region
        with saver_of[outer]():
            expected = here()
            generators = [waits_inside(*inside[inner]())]
            next(generators[0])
            collect_elsewhere(generators)
            assert here() == expected
            with saver.region(tag2):
                assert here() == tag2
            assert here() == expected
        assert here() == tag2
    assert here() is None
    assert all(info.lease_count == 0 for info in saver.tags().values())
    saver.pause(tag2)
    saver.resume(tag2)


def test_an_exit_that_dies_in_another_thread_is_forgotten(saver, tag):
    region = saver.region(tag)
    exits = [region.__exit__]
    collect_elsewhere(exits)
    region.__enter__()
    assert tag_of(torch.ones(10, device=saver.device)) == tag
    region.__exit__(None, None, None)
    assert tag_of(torch.ones(10, device=saver.device)) is None


def test_a_region_hidden_from_its_thread_is_hidden_from_all(saver, tag, tag2):
    def elsewhere():
        found = []
        thread = threading.Thread(target=lambda: found.append(tag_of(torch.ones(10, device=saver.device))))
        thread.start()
        thread.join()
        return found[0]

    with saver.region(tag, threads="all"):
        assert elsewhere() == tag
        with saver.region(tag2):
            assert elsewhere() == tag
            with saver.disabled():
                assert elsewhere() is None
        with saver.disabled():
            assert elsewhere() is None
        assert elsewhere() == tag


def test_regions_that_end_out_of_order(saver, tag, tag2):
    first, second, third = (waits_inside(saver.region(name)) for name in (tag, tag2, tag))
    for generator in (first, second, third):
        next(generator)
    second.close()
    assert tag_of(torch.ones(10, device=saver.device)) == tag
    third.close()
    assert tag_of(torch.ones(10, device=saver.device)) == tag
    first.close()
    assert tag_of(torch.ones(10, device=saver.device)) is None


def test_memory_made_while_the_tag_is_away_is_resident_and_apart(saver, tag):
    """Cached free blocks of a paused tag are never handed out."""
    with saver.region(tag):
        keep = torch.full((BIG,), 1.0, device=saver.device)
        gone = torch.full((BIG,), 2.0, device=saver.device)
    freed = gone.data_ptr()
    del gone
    gc.collect()
    saver.pause(tag)
    with saver.region(tag):
        fresh = torch.full((BIG,), 3.0, device=saver.device)
        small = torch.full((10,), 4.0, device=saver.device)
    assert fresh.data_ptr() != freed
    assert float(fresh.sum()) == 3.0 * BIG
    assert saver.is_paused(tag)
    again = saver.pause(tag)
    assert again.bytes >= 4 * BIG
    saver.resume(tag)
    assert [float(t[0]) for t in (keep, fresh, small)] == [1.0, 3.0, 4.0]
    with saver.region(tag):
        reused = torch.full((BIG,), 5.0, device=saver.device)
    assert reused.data_ptr() == freed


def test_a_pool_made_while_away_is_not_entered_after_another_pause(saver, tag):
    with saver.region(tag):
        keep = torch.ones(BIG, device=saver.device)
    for cycle in range(3):
        saver.pause(tag)
        with saver.region(tag):
            torch.full((BIG,), float(cycle), device=saver.device)  # freed at once: a cached block of this epoch
        saver.pause(tag)
        with saver.region(tag):
            tensor = torch.full((BIG,), float(cycle), device=saver.device)
            assert float(tensor.sum()) == cycle * BIG
    saver.resume(tag)
    assert float(keep.sum()) == BIG


def test_pools_are_used_again(saver, tag):
    with saver.region(tag):
        pass
    made = saver.stats()["pools_made"]
    for _ in range(50):
        with saver.region(tag):
            torch.ones(10, device=saver.device)
    assert saver.stats()["pools_made"] == made


def test_pause_with_another_policy_in_one_tag(saver, tag):
    with saver.region(tag):
        kept = torch.full((BIG,), 1.0, device=saver.device)
    with saver.region(tag, backup=None):
        dropped = torch.full((BIG,), 2.0, device=saver.device)
    addresses = kept.data_ptr(), dropped.data_ptr()
    report = saver.pause(tag)
    assert report.copied < report.bytes
    saver.resume(tag)
    assert (kept.data_ptr(), dropped.data_ptr()) == addresses
    assert float(kept.sum()) == BIG
    assert float(dropped.abs().sum()) == 0  # zeros, never old bytes (invariant 2)


def test_a_region_object_dies_quietly(saver, tag):
    for _ in range(10):
        saver.region(tag)
    scope = saver.region(tag)
    scope.__enter__()
    tensor = torch.ones(10, device=saver.device)
    scope.__exit__(None, None, None)
    del scope
    gc.collect()
    assert float(tensor.sum()) == 10


def test_leaving_what_was_not_entered(saver, tag):
    with saver.region(tag):
        pass
    with pytest.raises(StateError, match="has left already, or never entered"):
        saver.region(tag).__exit__(None, None, None)
