"""A pauseable program's torch, without a GPU: while the program's tag is away nobody is given memory that is.

The preload library's part is played by the model: whatever torch asks the driver for has the program's tag.
"""

import ctypes
import threading

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from ebbtide import _core  # noqa: E402
from ebbtide.errors import DriverError, OutOfMemoryError, StateError  # noqa: E402
from ebbtide.saver import captures, cuda_pools, detour, frames, leases, pools, program, unused  # noqa: E402
from torch_model import TorchModel  # noqa: E402

MIB = 1 << 20
RAM = 1
DEFAULT = detour.DEFAULT_POOL


class CachingTorch(TorchModel):
    """The model, with memory: segments of the program's tag, whole ones, and a cache of free ones in each pool."""

    def __init__(self, tag):
        super().__init__((2, 13))
        self.tag = tag
        self.pool_of = {}
        self.size_of = {}
        self.free_in = {}
        self.cleared_workspaces = 0

    def install(self, monkeypatch):
        super().install(monkeypatch)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "memory_snapshot", self.snapshot)
        monkeypatch.setattr(torch.cuda, "empty_cache", self.empty_cache)
        monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", self.clear_workspaces, raising=False)

    def clear_workspaces(self):
        self.cleared_workspaces += 1

    def malloc(self, mib):
        pool = self.route() or DEFAULT
        cached = self.free_in.setdefault(pool, [])
        address = next((one for one in cached if self.size_of[one] == mib * MIB), None)
        if address is None:
            address = _core.alloc(self.tag, mib * MIB, 0, RAM)
            self.pool_of[address], self.size_of[address] = pool, mib * MIB
        else:
            cached.remove(address)
        return address

    def free(self, address):
        self.free_in.setdefault(self.pool_of[address], []).append(address)

    def empty_cache(self):
        idle = {key for key, count in self.use_counts.items() if count == 0}
        if not self.recording[0]:
            idle.add(DEFAULT)
        for pool in idle:
            for address in self.free_in.pop(pool, []):
                _core.free(address)
                del self.pool_of[address], self.size_of[address]

    def snapshot(self, mempool_id=None, include_traces=True):
        assert not include_traces
        return [self._segment(address, pool) for address, pool in self.pool_of.items()]

    def _segment(self, address, pool):
        is_free = address in self.free_in.get(pool, ())
        size = self.size_of[address]
        block = {"address": address, "size": size, "state": "inactive" if is_free else "active_allocated"}
        return {"address": address, "total_size": size, "blocks": [block], "segment_pool_id": pool}


class PauseableProgram:
    def __init__(self, saver, tag, model):
        self.saver, self.tag, self.model = saver, tag, model
        self.live = {}

    def make(self, mib, byte):
        address = self.model.malloc(mib)
        assert not _core.is_away(address, mib * MIB)
        ctypes.memset(address, byte, mib * MIB)
        self.live[address] = bytes([byte]) * 64
        return address

    def drop(self, address):
        del self.live[address]
        self.model.free(address)

    def check(self):
        for address, want in self.live.items():
            if not _core.is_away(address, 64):
                assert ctypes.string_at(address, 64) == want


@pytest.fixture
def make_program(saver, monkeypatch):
    assert saver.device
    made = []

    def make(tag):
        model = CachingTorch(tag)
        model.install(monkeypatch)
        monkeypatch.setattr(pools, "_backend", cuda_pools.CudaPools((2, 13)))
        monkeypatch.setattr(frames, "shelf", leases.Shelf())
        monkeypatch.setattr(frames, "_state", frames._ThreadState())
        monkeypatch.setattr(captures, "install", lambda: None)
        monkeypatch.setattr(program, "_own", program.Program(tag, RAM))
        monkeypatch.setattr(detour, "_former", set())
        program.introduce()
        made.append(PauseableProgram(saver, tag, model))
        return made[-1]

    yield make
    for one in made:
        end(one)


def end(one):
    one.saver.resume(one.tag)
    assert one.model.recording == {0: [], 1: []}
    assert not detour._open
    for address in list(one.live):
        one.drop(address)
    one.model.empty_cache()
    assert not one.model.pool_of


@pytest.fixture
def mine(make_program, tag):
    return make_program(tag)


def routes_of_threads(model):
    """Where another thread's allocations go."""
    seen = []
    thread = threading.Thread(target=lambda: seen.append(model.route()))
    thread.start()
    thread.join(30)
    return seen[0]


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
    other = mine.make(4, 3)  # the cache has one of this size, which is away
    assert [held.bytes for held in report.left if held.tag == mine.tag] == []
    saver.resume(mine.tag)
    assert mine.model.route() is None is routes_of_threads(mine.model)
    mine.check()
    assert {_core.find(address).tag for address in (kept, other)} == {mine.tag}
    assert saver.pause(mine.tag).bytes == 16 * MIB


def test_devices_without_memory_of_the_tag_have_no_detour(mine, saver):
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
    assert unused.find([mine.tag], -1)[0] == []
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda **_: [{"address": 0}])
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
        with saver.disabled():
            assert mine.model.route() == routes_of_threads(mine.model)
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


def test_old_torch_is_refused(mine, saver, monkeypatch):
    mine.make(2, 1)
    monkeypatch.setattr(torch, "__version__", "2.10.1")
    with pytest.raises(StateError, match=r"torch 2\.11 or newer, and this is 2\.10\.1"):
        saver.pause()
    assert not saver.is_paused(mine.tag)


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
    mine.make(2, 2)
    assert mine.model.route() not in (None, inside)  # whatever the failure left of it
    assert saver.is_paused(mine.tag)


def test_during_a_capture_torch_is_not_touched(mine, saver, monkeypatch):
    mine.make(2, 1)
    monkeypatch.setattr(captures, "is_capturing", lambda: True)
    begun = []
    monkeypatch.setattr(torch._C, "_cuda_beginAllocateToPool", lambda *pool: begun.append(pool))
    _core.begin_capture()
    try:
        with pytest.raises(StateError, match="capture"):
            saver.pause(mine.tag)
    finally:
        _core.end_capture()
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


def test_a_pause_that_came_since_keeps_the_detour(mine, saver):
    mine.make(2, 1)
    saver.pause(mine.tag)
    inside = mine.model.route()
    detour.follow([mine.tag])  # as after a resume that is over by now
    assert mine.model.route() == inside


def test_swap_and_paused_take_the_detour(mine, saver, tag2):
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


def test_an_asynchronous_resume_ends_the_detour_when_it_is_over(mine, saver):
    mine.make(2, 1)
    saver.pause(mine.tag)
    pending = saver.resume(mine.tag, wait=False)
    pending.wait()
    assert mine.model.route() is None
    saver.pause(mine.tag)
    dropped = saver.resume(mine.tag, wait=False)
    watcher = next((one for one in threading.enumerate() if one.name == "ebbtide-detour"), None)
    if watcher is not None:
        watcher.join(30)
    assert dropped.done
    assert mine.model.route() is None


def test_what_torch_cached_meanwhile_makes_room_for_the_resume(mine, saver):
    mine.make(16, 1)
    saver.pause(mine.tag)
    mine.drop(mine.make(12, 2))
    saver.configure(device_limit=_core.query_device(0).held_bytes + 8 * MIB)
    saver.resume(mine.tag)
    saver.configure(device_limit=None)
    mine.check()


def test_no_room_for_the_resume_leaves_the_detour(mine, saver):
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
                assert mine.model.route() not in (None, *(pool_id for _, pool_id in detour._open))
        mine.check()
        assert bool(mine.model.recording[0]) == saver.is_paused(mine.tag)
    end(mine)


def test_a_failing_driver_leaves_every_byte_and_no_cache_that_is_away(mine, saver):
    from core_sim import UNKNOWN, Sim

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


PRELOADED = "/x/libebbtide_preload.so"
ON = {"EBBTIDE_PAUSEABLE": "1"}


@pytest.mark.parametrize(
    ("environment", "library", "expected"),
    [
        (ON, PRELOADED, ("default", 1)),
        ({**ON, "EBBTIDE_TAG": "job", "EBBTIDE_BACKUP": "disk"}, PRELOADED, ("job", 3)),
        ({**ON, "EBBTIDE_TAG": "a/b", "EBBTIDE_BACKUP": "tape"}, PRELOADED, ("default", 1)),
        ({**ON, "EBBTIDE_BACKUP": "none"}, PRELOADED, ("default", 0)),
        (ON, "/x/libebbtide.so", None),
        ({**ON, "EBBTIDE_PRELOAD": "0"}, PRELOADED, None),
        ({**ON, "EBBTIDE_DRIVER": "off"}, PRELOADED, None),
        ({**ON, "EBBTIDE_DRIVER": "sim"}, PRELOADED, None),
        ({"EBBTIDE_PAUSEABLE": "0"}, PRELOADED, None),
        ({}, PRELOADED, None),
    ],
)
def test_which_programs_are_pauseable(environment, library, expected):
    read = program.read(environment, library)
    assert (None if read is None else (read.tag, read.backup)) == expected


def test_a_program_that_is_not_pauseable_is_not_touched(saver, tag, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(detour, "_open_pools", None)
    assert program.own() is None
    with saver.region(tag):
        tensor = torch.ones(1000, device=saver.device)
    saver.pause(tag)
    saver.resume(tag)
    assert float(tensor.sum()) == 1000
    detour.renew()
    detour.follow([])
    assert detour.idle_segments() == []
