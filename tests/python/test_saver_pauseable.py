"""The torch of a pauseable program, without a GPU: while the program's tag is paused, no thread gets paused memory."""

import ctypes
import threading

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from core_sim import UNKNOWN, Sim  # noqa: E402
from ebbtide import _core  # noqa: E402
from ebbtide.errors import DriverError, OutOfMemoryError, StateError, StoreError  # noqa: E402
from ebbtide.saver.check import enabling  # noqa: E402
from ebbtide.saver.pools import bypass, captures  # noqa: E402
from ebbtide.saver.reclaim.look import Look  # noqa: E402
from ebbtide.saver.values.arguments import PauseRequest  # noqa: E402
from pauseable_model import DEFAULT, MIB, RAM, routes_of_threads  # noqa: E402

# The model of torch's cache reads and writes device memory as the CPU does.
pytestmark = pytest.mark.sim_only


def test_the_tag_is_known_before_anything_was_allocated(mine, saver):
    assert saver.tags()[mine.tag].state == "empty"
    assert saver.pause(mine.tag).bytes == 0
    assert not saver.is_paused(mine.tag)
    assert mine.model.route() is None


def test_while_the_tag_is_away_all_threads_have_a_fresh_pool(mine, saver):
    mine.drop(mine.make(4, 1))
    kept = mine.make(8, 2)
    report = saver.pause(mine.tag)
    assert report.bytes == 12 * MIB
    inside = mine.model.route()
    assert inside not in (None, DEFAULT)
    assert routes_of_threads(mine.model) == inside
    other = mine.make(4, 3)  # the cache has a paused segment of this size
    assert [held.bytes for held in report.remaining if held.tag == mine.tag] == []
    saver.resume(mine.tag)
    assert mine.model.route() is None is routes_of_threads(mine.model)
    mine.check()
    assert {_core.find(address).tag for address in (kept, other)} == {mine.tag}
    assert saver.pause(mine.tag).bytes == 16 * MIB


def test_devices_without_memory_of_the_tag_have_no_bypass(mine, saver):
    mine.make(2, 1)
    saver.pause(mine.tag)
    assert [len(mine.model.recording[device]) for device in (0, 1)] == [1, 0]


def test_a_second_pause_takes_what_was_allocated_meanwhile(mine, saver):
    mine.make(2, 1)
    saver.pause(mine.tag)
    first = mine.model.route()
    mine.drop(mine.make(6, 2))
    mine.make(4, 3)
    assert saver.pause(mine.tag).bytes == 10 * MIB
    assert mine.model.route() not in (None, first)
    mine.make(6, 4)
    saver.resume()
    mine.check()


def test_free_blocks_are_unused_and_those_of_graphs_are_not(mine, saver):
    mine.drop(mine.make(4, 1))
    mine.make(2, 2)
    saver.pause(mine.tag)
    mine.drop(mine.make(8, 3))
    saver.resume(mine.tag)
    graph = (77, 0)
    in_graph = mine.model.malloc(6)
    ctypes.memset(in_graph, 5, 6 * MIB)
    mine.model.pool_of[in_graph] = graph
    mine.model.free_in[graph] = [in_graph]
    report = saver.pause(mine.tag)
    assert report.unused == 12 * MIB
    saver.resume(mine.tag)
    assert ctypes.string_at(in_graph, 64) == b"\5" * 64
    mine.model.use_counts[graph] = 0


def test_nothing_is_unused_outside_a_pause_or_where_the_snapshot_is_not_understood(mine, saver, monkeypatch):
    mine.drop(mine.make(4, 1))
    assert Look([mine.tag]).unused(PauseRequest([mine.tag], -1))[0] == []
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [{"address": 0}])
    assert saver.pause(mine.tag).unused == 0


def test_without_a_backup_nothing_is_looked_for(mine, saver, monkeypatch):
    mine.drop(mine.make(4, 1))
    monkeypatch.setattr(torch.cuda, "memory_snapshot", None)
    assert saver.pause(mine.tag, backup=None).bytes == 4 * MIB


def test_other_tags_leave_torch_alone(mine, saver, tag2):
    mine.make(2, 1)
    with saver.region(tag2):
        pass
    saver.pause(tag2)
    assert mine.model.route() is None
    saver.pause(mine.tag)
    inside = mine.model.route()
    saver.resume(tag2)
    assert mine.model.route() == inside


def test_regions_win_whether_they_began_before_or_after(mine, saver, tag2):
    mine.make(2, 1)
    with saver.region(tag2):
        before = mine.model.route()
        saver.pause(mine.tag)
        assert mine.model.route() == before
        assert routes_of_threads(mine.model) not in (None, before)
    assert mine.model.route() == routes_of_threads(mine.model)
    with saver.region(tag2):
        assert mine.model.route() == before
        with saver.disabled():  # memory of its own, since what torch caches is tagged
            assert mine.model.route() not in (None, before, routes_of_threads(mine.model))
        assert mine.model.route() == before
        saver.resume(mine.tag)
        assert mine.model.route() == before
    assert mine.model.route() is None


def test_another_threads_region_stands_against_the_pause(mine, saver, tag2):
    mine.make(2, 1)
    inside, leave = threading.Event(), threading.Event()

    def hold():
        with saver.region(tag2):
            inside.set()
            assert leave.wait(30)

    thread = threading.Thread(target=hold, name="rollout")
    thread.start()
    try:
        assert inside.wait(30)
        with pytest.raises(StateError, match=r"thread 'rollout' is in a region.*leave the region first"):
            saver.pause(mine.tag)
        assert not saver.is_paused(mine.tag)
    finally:
        leave.set()
        thread.join(30)
    assert mine.model.route() is None
    saver.pause(mine.tag)


def test_a_pause_that_is_refused_leaves_torch_as_it_was(mine, saver, tag2):
    mine.make(2, 1)
    with saver.region(tag2):
        with pytest.raises(StateError):
            saver.pause()
        with pytest.raises(StateError, match="was ever named"):
            saver.pause(mine.tag, "never named")
        saver.pause(mine.tag)
    inside = mine.model.route()
    with pytest.raises(StateError, match="was ever named"):
        saver.pause(mine.tag, "never named")
    assert mine.model.route() == inside
    mine.make(2, 2)
    saver.configure(host_limit=1)
    with pytest.raises(StoreError):  # which only the claim can tell, when the pools are open
        saver.pause(mine.tag)
    saver.configure(host_limit=None)
    assert mine.model.route() not in (None, inside)  # whatever route the failure has left
    assert saver.is_paused(mine.tag)


def test_during_a_capture_torch_is_not_touched(mine, saver, monkeypatch):
    mine.make(2, 1)
    monkeypatch.setattr(captures, "is_capturing", lambda: True)
    begun = []
    monkeypatch.setattr(torch._C, "_cuda_beginAllocateToPool", lambda *pool: begun.append(pool))
    capture = _core.Frame()
    capture.begin_capture()
    try:
        with pytest.raises(StateError, match="capture"):
            saver.pause(mine.tag)
    finally:
        capture.close()
    assert not begun


@pytest.mark.parametrize("k", [1, 2])
def test_a_pool_that_cannot_be_opened(mine, saver, monkeypatch, k):
    mine.make(2, 1)
    begin, calls = torch._C._cuda_beginAllocateToPool, []

    def fail(device, pool_id):
        calls.append(pool_id)
        if len(calls) == k:
            raise RuntimeError("planted")
        begin(device, pool_id)

    monkeypatch.setattr(torch._C, "_cuda_beginAllocateToPool", fail)
    with pytest.raises(RuntimeError, match="planted"):
        saver.pause(mine.tag)
    assert saver.is_paused(mine.tag) == (k == 2)
    assert (mine.model.route() is None) == (k == 1)
    monkeypatch.setattr(torch._C, "_cuda_beginAllocateToPool", begin)
    saver.pause(mine.tag)
    mine.make(2, 2)
    saver.resume(mine.tag)
    mine.check()


def test_workspaces_are_forgotten_once_nobody_takes_new_ones_from_the_cache(mine, saver):
    mine.make(2, 1)
    routes = []
    mine.model.clear_workspaces = None
    torch._C._cuda_clearCublasWorkspaces = lambda: routes.append(mine.model.route())
    saver.pause(mine.tag)
    assert routes[-1] not in (None, mine.model.route())


def test_what_is_allocated_just_before_the_pause_is_not_handed_out_after_it(mine, saver, monkeypatch):
    mine.make(2, 1)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: mine.drop(mine.make(6, 2)))
    saver.pause(mine.tag)
    mine.make(6, 3)
    saver.resume(mine.tag)
    mine.check()


def test_a_pause_that_came_since_keeps_the_bypass(mine, saver):
    mine.make(2, 1)
    saver.pause(mine.tag)
    inside = mine.model.route()
    bypass.close_if_resident([mine.tag])  # as after a resume that has ended meanwhile
    assert mine.model.route() == inside


def test_a_pause_turns_the_check_on(mine, saver, monkeypatch):
    asked = []
    monkeypatch.setenv("EBBTIDE_CHECK", "1")
    monkeypatch.setattr(enabling, "enable_if_asked", lambda: asked.append(True))
    saver.pause(mine.tag)
    assert asked


def test_swap_and_paused_take_the_bypass(mine, saver, tag2):
    mine.make(2, 1)
    _core.free(_core.alloc(tag2, MIB, 0, RAM))
    saver.swap(pause=mine.tag, resume=tag2)
    assert mine.model.route() is not None
    mine.make(2, 2)
    saver.swap(pause=tag2, resume=mine.tag)
    assert mine.model.route() is None
    with saver.paused(mine.tag):
        assert mine.model.route() is not None
        mine.make(2, 3)
    assert mine.model.route() is None
    mine.check()


def test_an_asynchronous_resume_ends_the_bypass_when_it_is_over(mine, saver):
    mine.make(2, 1)
    saver.pause(mine.tag)
    pending = saver.resume(mine.tag, wait=False)
    pending.wait()
    assert mine.model.route() is None
    saver.pause(mine.tag)
    dropped = saver.resume(mine.tag, wait=False)
    watcher = next((one for one in threading.enumerate() if one.name == "ebbtide-bypass"), None)
    if watcher is not None:
        watcher.join(30)
    assert dropped.done
    assert mine.model.route() is None


def test_where_no_thread_can_be_started_the_resume_itself_ends_the_bypass(mine, saver, monkeypatch):
    def refuse(*_):
        raise RuntimeError("can't start new thread")

    mine.make(2, 1)
    saver.pause(mine.tag)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    saver.resume(mine.tag, wait=False).wait()
    assert mine.model.route() is None


def test_what_torch_cached_meanwhile_makes_room_for_the_resume(mine, saver):
    mine.make(16, 1)
    saver.pause(mine.tag)
    mine.drop(mine.make(12, 2))
    saver.configure(device_limit=_core.query_device(0).held_bytes + 8 * MIB)
    saver.resume(mine.tag)
    saver.configure(device_limit=None)
    mine.check()


def test_no_room_for_the_resume_leaves_the_bypass(mine, saver):
    mine.make(16, 1)
    saver.pause(mine.tag)
    mine.make(12, 2)
    saver.configure(device_limit=_core.query_device(0).held_bytes + 8 * MIB)
    with pytest.raises(OutOfMemoryError):
        saver.resume(mine.tag)
    assert mine.model.route() is not None
    mine.make(4, 3)
    saver.configure(device_limit=None)
    saver.resume(mine.tag)
    mine.check()


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("make"), st.sampled_from([2, 4, 6])),
        st.tuples(st.sampled_from(["drop", "pause", "resume", "empty", "region"]), st.integers(0, 7)),
    ),
    max_size=24,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=ACTIONS)
def test_whatever_happens_nobody_is_given_memory_that_is_away(make_program, saver, tag, tag2, actions):
    mine = make_program(tag)
    for number, (action, value) in enumerate(actions):
        if action == "make":
            mine.make(value, number + 1)
        elif action == "drop" and mine.live:
            mine.drop(sorted(mine.live)[value % len(mine.live)])
        elif action == "pause":
            saver.pause(mine.tag)
        elif action == "resume":
            saver.resume()
        elif action == "empty":
            torch.cuda.empty_cache()
        elif action == "region":
            with saver.region(tag2):
                assert mine.model.route() not in (None, *(pool_id for pools in bypass._open for pool_id in pools.ids))
        mine.check()
        assert bool(mine.model.recording[0]) == saver.is_paused(mine.tag)
    mine.end()


def test_a_failing_driver_leaves_every_byte_and_no_cache_that_is_away(mine, saver):
    sim = Sim()
    for k in range(1, 60):
        mine.make(2, k)
        mine.drop(mine.make(4, k))
        failed = False
        sim.fail(None, k, UNKNOWN)
        try:
            saver.pause(mine.tag)
        except DriverError:
            failed = True
        finally:
            sim.clear_failures()
        assert (mine.model.route() is not None) == saver.is_paused(mine.tag)
        mine.make(4, k)
        saver.resume(mine.tag)
        assert mine.model.route() is None
        mine.check()
        for address in list(mine.live)[1:]:
            mine.drop(address)
        if not failed:
            break
    else:
        pytest.fail("the pause never came through")
