"""Expandable segments of torch's allocator, which regions switch off before torch 2.13, against a model of torch."""

import pytest

torch = pytest.importorskip("torch")

from ebbtide import _core  # noqa: E402
from ebbtide.errors import StateError  # noqa: E402
from ebbtide.saver.pools import cuda_pools  # noqa: E402
from ebbtide.torch_support import expandable_segments  # noqa: E402
from ebbtide.torch_support.allocator_settings import (  # noqa: E402
    ALLOCATOR_VARIABLES,
    EXPANDABLE_SEGMENTS_FROM,
    has_expandable_segments,
    says_no_expandable_segments,
    switched_on_by,
    without_expandable_segments,
)
from ebbtide.torch_support.expandable_segments import keep_off  # noqa: E402

OLDER = (2, 12)
SETTERS = ["_accelerator_setAllocatorSettings", "_cuda_cudaCachingAllocator_set_allocator_settings"]
ON = ["expandable_segments:True", "max_split_size_mb:64,expandable_segments:true", " expandable_segments : True "]
OFF = ["", "expandable_segments:False", "max_split_size_mb:64", "roundup_power2_divisions:[256:1,512:2,>:8]"]


class Allocator:
    """The settings of torch's allocator in one process: `given` has those that were set while it ran."""

    def __init__(self, monkeypatch, setter, environment=""):
        self.given, self.can_change = [], True
        self.in_force = environment
        monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", environment)
        for name in SETTERS:
            monkeypatch.delattr(torch._C, name, raising=False)
        if setter:
            monkeypatch.setattr(torch._C, setter, self.set_settings, raising=False)
        monkeypatch.setattr(torch.cuda.memory, "_snapshot", self.snapshot)
        self.flushes = []
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: self.flushes.append(self.in_force))
        expandable_segments._say_once.cache_clear()

    def set_settings(self, settings):
        self.given.append(settings)
        if self.can_change:
            self.in_force = settings

    def snapshot(self):
        return {
            "segments": [],
            "allocator_settings": {
                "PYTORCH_CUDA_ALLOC_CONF": self.in_force,
                "expandable_segments": has_expandable_segments(self.in_force),
            },
        }


def lines_of(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "ebbtide"]


@pytest.mark.parametrize("settings", ON)
def test_settings_that_switch_them_on_are_switched_off_and_others_stay(settings):
    assert has_expandable_segments(settings)
    fixed = without_expandable_segments(settings)
    assert not has_expandable_segments(fixed) and "expandable_segments" in fixed
    assert ("max_split_size_mb:64" in fixed) == ("max_split_size_mb:64" in settings)
    assert without_expandable_segments(fixed) == fixed


@pytest.mark.parametrize("settings", OFF)
def test_others_do_not_switch_them_on(settings):
    assert not has_expandable_segments(settings)
    assert without_expandable_segments(settings) == (
        settings if "expandable" in settings else f"{settings},expandable_segments:False".lstrip(",")
    )


@pytest.mark.parametrize("variable", ALLOCATOR_VARIABLES)
def test_a_variable_switches_them_on_where_regions_cannot_work_with_them(variable):
    assert switched_on_by({variable: ON[0]}, OLDER) == variable
    assert switched_on_by({variable: ON[0]}, EXPANDABLE_SEGMENTS_FROM) == ""
    assert switched_on_by({variable: "max_split_size_mb:64"}, OLDER) == switched_on_by({}, OLDER) == ""


@pytest.mark.parametrize("setter", SETTERS)
@pytest.mark.parametrize("settings", ON)
def test_regions_switch_them_off_and_say_so_once(monkeypatch, caplog, setter, settings):
    allocator = Allocator(monkeypatch, setter, settings)
    for _ in range(2):
        keep_off(OLDER)
        assert allocator.given == allocator.flushes == [without_expandable_segments(settings)]
    (line,) = lines_of(caplog)
    assert "expandable segments are off" in line


@pytest.mark.parametrize("setter", SETTERS)
def test_the_program_may_switch_them_on_while_it_runs_before_the_first_region(monkeypatch, caplog, setter):
    allocator = Allocator(monkeypatch, setter)
    getattr(torch._C, setter)("garbage_collection_threshold:0.6,expandable_segments:True")  # no variable says so
    keep_off(OLDER)
    assert allocator.in_force == "garbage_collection_threshold:0.6,expandable_segments:False"
    assert len(lines_of(caplog)) == 1


@pytest.mark.parametrize("setter", SETTERS)
def test_they_stay_off_when_the_program_switches_them_on_later(monkeypatch, caplog, setter):
    """As verl and vLLM do around their own pools."""
    allocator = Allocator(monkeypatch, setter, "max_split_size_mb:64")
    keep_off(OLDER)
    assert allocator.given == [] and lines_of(caplog) == []
    for _ in range(2):
        getattr(torch._C, setter)("expandable_segments:False")
        getattr(torch._C, setter)("max_split_size_mb:32,expandable_segments:True")
    assert allocator.given == ["expandable_segments:False", "max_split_size_mb:32,expandable_segments:False"] * 2
    assert len(lines_of(caplog)) == 1
    getattr(torch._C, setter)("max_split_size_mb:16")
    assert allocator.in_force == "max_split_size_mb:16"


@pytest.mark.parametrize("setter", ["", SETTERS[0]])
def test_a_torch_that_cannot_is_refused_with_what_to_set(monkeypatch, setter):
    allocator = Allocator(monkeypatch, setter, "max_split_size_mb:64,expandable_segments:True")
    allocator.can_change = False
    with pytest.raises(StateError, match=r"PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:64,expandable_segments:False$"):
        keep_off(OLDER)


def test_where_torch_does_not_say_the_variable_does(monkeypatch):
    allocator = Allocator(monkeypatch, SETTERS[0], "expandable_segments:True")
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"segments": []})
    keep_off(OLDER)
    assert allocator.in_force == "expandable_segments:False"


def test_where_regions_work_with_them_nothing_is_touched(monkeypatch, caplog):
    allocator = Allocator(monkeypatch, SETTERS[0], "expandable_segments:True")
    keep_off(EXPANDABLE_SEGMENTS_FROM)
    getattr(torch._C, SETTERS[0])("expandable_segments:True")
    assert allocator.given == ["expandable_segments:True"] and lines_of(caplog) == []


def test_the_backend_of_gpus_switches_them_off(monkeypatch):
    allocator = Allocator(monkeypatch, SETTERS[0], "expandable_segments:True")
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch, "__version__", "2.12.0")
    monkeypatch.setattr(cuda_pools, "CudaPools", lambda version: version)
    assert cuda_pools.make_backend() == OLDER
    assert allocator.in_force == "expandable_segments:False"


# --- LMS prefers them ---

HOLD, RELEASE = "expandable_segments:False", "expandable_segments:True"


@pytest.fixture
def preferred(monkeypatch):
    """The settings that torch was given since LMS prefers them."""
    allocator = Allocator(monkeypatch, SETTERS[0])
    monkeypatch.setattr(torch, "__version__", "2.12.0")
    keep_off(OLDER)  # what a region has put around torch's setter does not count
    expandable_segments.prefer()
    yield allocator.given
    expandable_segments.prefer_no_more()


def test_they_are_off_while_a_region_is_open(saver, preferred, driver_name):
    assert preferred == [RELEASE]
    with saver.region("a"):
        assert preferred == [RELEASE, HOLD]
        with saver.region("b"), saver.disabled():
            # torch's pools are closed there; on the simulated device a region stays open, and answers as torch's does.
            assert preferred[-1] == (HOLD if driver_name == "sim" else RELEASE)
        assert preferred[-1] == HOLD
    assert preferred[-1] == RELEASE and (driver_name == "cuda" or preferred == [RELEASE, HOLD, RELEASE])
    before = list(preferred)
    expandable_segments.prefer_no_more()
    assert preferred == [*before, HOLD]
    with saver.region("a"):
        assert preferred == [*before, HOLD]


def test_the_first_region_after_lms_leaves_them_on_outside(monkeypatch, caplog):
    allocator = Allocator(monkeypatch, SETTERS[0])
    monkeypatch.setattr(torch, "__version__", "2.12.0")
    expandable_segments.prefer()
    try:
        keep_off(OLDER)
        assert (allocator.given, allocator.flushes, lines_of(caplog)) == ([RELEASE], [], [])
        getattr(torch._C, SETTERS[0])("max_split_size_mb:64")  # watched all the same
        assert allocator.in_force == f"max_split_size_mb:64,{RELEASE}"
    finally:
        expandable_segments.prefer_no_more()


def test_while_another_thread_is_in_a_region_too(saver, preferred):
    import threading

    entered, leave = threading.Event(), threading.Event()

    def work():
        with saver.region("a"):
            entered.set()
            leave.wait(60)

    thread = threading.Thread(target=work)
    thread.start()
    assert entered.wait(60)
    with saver.region("b"):
        assert preferred == [RELEASE, HOLD]
    assert preferred == [RELEASE, HOLD]
    leave.set()
    thread.join()
    assert preferred == [RELEASE, HOLD, RELEASE]


def test_and_while_a_graph_is_captured(preferred):
    frame = _core.Frame()
    frame.begin_capture()
    try:
        assert preferred == [RELEASE, HOLD]
    finally:
        frame.close()
    assert preferred == [RELEASE, HOLD, RELEASE]


def test_switched_on_inside_a_region_they_come_on_at_its_end(saver, preferred):
    expandable_segments.prefer_no_more()
    preferred.clear()
    with saver.region("a"):
        expandable_segments.prefer()
        assert preferred == [HOLD]
    assert preferred == [HOLD, RELEASE]


def test_a_setter_that_fails_leaves_the_region_closed(saver):
    def fail(settings):
        if settings == HOLD:
            raise RuntimeError("no")

    _core.expand_segments(fail, RELEASE, HOLD)
    try:
        with pytest.raises(RuntimeError, match="no"), saver.region("a"):
            raise AssertionError("it was entered")
    finally:
        with pytest.raises(RuntimeError, match="no"):
            _core.expand_segments(None)
    with saver.region("a"):
        pass


def test_other_settings_stay(monkeypatch, saver):
    """torch forgets those that a call does not name."""
    allocator = Allocator(monkeypatch, SETTERS[0], "max_split_size_mb:64,expandable_segments:True")
    monkeypatch.setattr(torch, "__version__", "2.12.0")
    keep_off(OLDER)
    expandable_segments.prefer()
    with saver.region("a"):
        getattr(torch._C, SETTERS[0])("max_split_size_mb:32,expandable_segments:False")  # as verl does around its pools
        getattr(torch._C, SETTERS[0])("max_split_size_mb:16")
    expandable_segments.prefer_no_more()
    on, off = "{},expandable_segments:True".format, "{},expandable_segments:False".format
    sizes = [f"max_split_size_mb:{size}" for size in (64, 32, 16)]
    # Before LMS, with it, in the region, twice set there, after it, without LMS.
    assert allocator.given == [
        off(sizes[0]),
        on(sizes[0]),
        off(sizes[0]),
        off(sizes[1]),
        off(sizes[2]),
        on(sizes[2]),
        off(sizes[2]),
    ]


@pytest.mark.parametrize("variable", ALLOCATOR_VARIABLES)
def test_where_the_environment_says_no_they_stay_off(monkeypatch, variable):
    allocator = Allocator(monkeypatch, SETTERS[0])
    monkeypatch.setenv(variable, "max_split_size_mb:64,expandable_segments:False")
    expandable_segments.prefer()
    assert allocator.given == []
    assert not says_no_expandable_segments("max_split_size_mb:64")
    assert not any(says_no_expandable_segments(settings) for settings in ON)


def test_from_torch_2_13_on_regions_leave_them_on(monkeypatch, saver):
    allocator = Allocator(monkeypatch, SETTERS[0])
    monkeypatch.setattr(torch, "__version__", "2.13.0")
    for _ in range(2):
        expandable_segments.prefer()
        with saver.region("a"):
            pass
    assert allocator.given == [RELEASE]
    expandable_segments.prefer_no_more()
    expandable_segments.prefer_no_more()
    assert allocator.given == [RELEASE, HOLD]
