"""The two limits that hold together on a GPU, over a torch whose numbers the test sets. tests/gpu/test_gpu_lms.py has
the rest.
"""

import gc
import types

import pytest

torch = pytest.importorskip("torch")

from ebbtide import _core  # noqa: E402
from ebbtide.lms import devices  # noqa: E402

pytestmark = pytest.mark.sim_only

MIB = 1 << 20
TOTAL = 65536 * MIB  # more than all tests have left away from the device: that much more, torch may reserve


class Gpu:
    """torch's answers about the one GPU."""

    def __init__(self):
        self.ordinary = 64 * MIB
        self.fraction = 1.0
        self.is_capturing = False
        self.flushes = 0

    def of_tags(self):
        return sum(tag.size_bytes for tag in _core.tags())

    def empty_cache(self):
        self.flushes += 1


@pytest.fixture
def gpu(saver, monkeypatch):
    gc.collect()
    saver.trim()  # what earlier tests left free would count on the limits
    found = Gpu()
    pretended = {
        "init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "memory_reserved": lambda device: found.ordinary + found.of_tags(),
        "max_memory_reserved": lambda device: found.ordinary + found.of_tags(),
        "get_device_properties": lambda device: types.SimpleNamespace(total_memory=TOTAL),
        "get_per_process_memory_fraction": lambda device: found.fraction,
        "set_per_process_memory_fraction": lambda fraction, device: setattr(found, "fraction", fraction),
        "empty_cache": found.empty_cache,
        "reset_peak_memory_stats": lambda device: None,
    }
    for name, function in pretended.items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(devices.captures, "is_capturing", lambda: found.is_capturing)
    return found


@pytest.fixture
def device(gpu):
    made = devices.CudaDevice()
    yield made
    made.set_limit(None)
    assert gpu.fraction == 1.0 and _core.query_device(0).limit_bytes == _core.UNLIMITED


def on_device_bytes():
    return sum(tag.resident_bytes - tag.host_bytes for tag in _core.tags())


def fraction_of(size_bytes):
    return pytest.approx(size_bytes / TOTAL)


def test_without_tags_on_the_host_both_limits_are_of_the_held_memory(gpu, device, saver, tag):
    with saver.region(tag):
        kept = torch.empty(16 * MIB, dtype=torch.uint8)
    assert device.held_bytes() == gpu.ordinary + on_device_bytes()
    device.set_limit(256 * MIB)
    assert gpu.fraction == fraction_of(256 * MIB + gpu.of_tags() - on_device_bytes())
    assert _core.query_device(0).limit_bytes == 256 * MIB - gpu.ordinary
    del kept


@pytest.mark.parametrize("how", ["demote", "pause"])
def test_what_leaves_the_device_lets_torch_reserve_as_much_more(gpu, device, saver, tag, how):
    with saver.region(tag):
        kept = torch.ones(16 * MIB, dtype=torch.uint8)
    device.set_limit(256 * MIB)
    before, held = gpu.fraction, device.held_bytes()
    size = saver.tags()[tag].size_bytes
    getattr(saver, how)(tag)
    assert device.held_bytes() == held - size
    assert device.balance()
    assert gpu.fraction - before == fraction_of(size)
    assert _core.query_device(0).limit_bytes == 256 * MIB - gpu.ordinary
    saver.resume(tag, missing_ok=True)
    saver.promote(tag)
    assert not device.balance()
    assert gpu.fraction == before
    assert kept.sum().item() == 16 * MIB


def test_what_torch_caches_is_taken_from_the_tags(gpu, device):
    device.set_limit(256 * MIB)
    gpu.ordinary = 200 * MIB
    device.balance()
    assert _core.query_device(0).limit_bytes == 56 * MIB
    gpu.ordinary = 300 * MIB
    device.balance()
    assert _core.query_device(0).limit_bytes == 0


def test_a_limit_of_the_users_stays_the_lower_one(gpu, device, saver):
    saver.configure(device_limit="32MiB")
    gpu.fraction = lower = 128 * MIB / TOTAL
    device.set_limit(256 * MIB)
    assert gpu.fraction == lower and _core.query_device(0).limit_bytes == 32 * MIB
    device.set_limit(None)
    assert gpu.fraction == lower and _core.query_device(0).limit_bytes == 32 * MIB
    saver.configure(device_limit=None)
    gpu.fraction = 1.0


def test_while_tags_are_made_torch_refuses_nothing(gpu, device):
    device.set_limit(256 * MIB)
    limited = gpu.fraction
    with device.making():
        assert gpu.fraction == 1.0 and gpu.flushes == 1
        with device.making(trims=False):
            assert gpu.fraction == 1.0 and gpu.flushes == 1
        assert gpu.fraction == 1.0
        assert _core.query_device(0).limit_bytes == 256 * MIB - gpu.ordinary
    assert gpu.fraction == limited


def test_an_interrupt_as_a_region_begins_leaves_the_limit(gpu, device, monkeypatch):
    device.set_limit(256 * MIB)
    limited = gpu.fraction

    def interrupted():
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "empty_cache", interrupted)
        with pytest.raises(KeyboardInterrupt), device.making():
            pass
    gc.collect()
    device.balance()
    assert gpu.fraction == limited


def test_the_whole_device_needs_no_limit_of_torchs(gpu, device):
    device.set_limit(900 * MIB, is_whole=True)
    assert gpu.fraction == 1.0 and _core.query_device(0).limit_bytes == _core.UNLIMITED
    assert not device.balance()
    assert gpu.fraction == 1.0


def test_a_capture_keeps_torchs_cache(gpu, device):
    gpu.is_capturing = True
    device.trim()
    assert gpu.flushes == 0
    gpu.is_capturing = False
    device.trim()
    assert gpu.flushes == 1


def test_memory_of_tags_is_not_ordinary(device, saver, tag):
    with saver.region(tag):
        inside = torch.empty(MIB)
        with device.ordinary():
            outside = torch.empty(MIB)
    assert saver.where(inside).tag == tag and saver.where(outside).tag is None


def test_torch_maps_whole_pages_which_its_limit_does_not_count(gpu, device, monkeypatch):
    def fraction_within(limit, has_pages):
        monkeypatch.setattr(devices.expandable_segments, "are_preferred", lambda: has_pages)
        device.set_limit(limit)
        return gpu.fraction

    for limit, page in ((512 * MIB, 20 * MIB), (64 * MIB, 4 * MIB)):
        assert fraction_within(limit, False) - fraction_within(limit, True) == fraction_of(page)


def test_the_peak_is_that_of_the_device(gpu, device, saver, tag):
    with saver.region(tag):
        kept = torch.ones(16 * MIB, dtype=torch.uint8)
    device.set_limit(256 * MIB)
    device.reset_peaks()
    gpu.ordinary = 100 * MIB
    device.balance()
    most = device.held_bytes()
    saver.demote(tag)
    gpu.ordinary = 10 * MIB
    assert most <= device.peak_bytes() <= 256 * MIB
    del kept


def test_of_two_devices_each_is_limited_and_the_fuller_one_limits_the_tags(gpu, device, monkeypatch):
    fractions = {0: 1.0, 1: 0.75}
    reserved = {0: lambda: gpu.ordinary + gpu.of_tags(), 1: lambda: 200 * MIB}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved[device]())
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: reserved[device]())
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", fractions.get)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda fraction, device: fractions.update({device: fraction})
    )
    assert device.held_bytes() == max(gpu.ordinary + on_device_bytes(), 200 * MIB)
    device.set_limit(256 * MIB)
    assert fractions[1] == fraction_of(256 * MIB)
    assert _core.query_device(0).limit_bytes == 56 * MIB
    device.set_limit(None)
    assert fractions == {0: 1.0, 1: 0.75}


def test_what_a_trim_released_is_no_part_of_a_demand(gpu, device, saver, tag, monkeypatch):
    """It lets torch reserve more, as what lies on the host does, but plans must not count on it."""
    told = []
    extension = devices.torch_extension.load("_lms")
    monkeypatch.setattr(extension, "set_cuda_away", lambda *arguments: told.append(arguments))
    with saver.region(tag):
        kept, temporary = (torch.empty(16 * MIB, dtype=torch.uint8) for _ in range(2))
    device.set_limit(256 * MIB)
    before = told[-1]
    del temporary
    gc.collect()
    saver.trim(tag)
    device.balance()
    info = saver.tags()[tag]
    released = info.size_bytes - info.resident_bytes
    assert released >= 16 * MIB and kept.nbytes <= info.resident_bytes
    assert told[-1] == (0, before[1] + released, before[2] + released, 0)
    saver.demote(tag)
    device.balance()
    assert told[-1] == (0, before[1] + info.size_bytes, before[2] + released, 0)


def test_where_torchs_limit_does_not_hold_lms_is_told_to_look_itself(gpu, device, saver, tag, monkeypatch):
    """It is at most the device, though torch counts what tags have on the host; it is lifted while states are made; and
    a flush may take memory away for which it was raised."""
    told = []
    monkeypatch.setattr(devices.torch_extension.load("_lms"), "set_cuda_away", lambda *given: told.append(given[-1]))
    with saver.region(tag):
        kept = torch.ones(64 * MIB, dtype=torch.uint8)
    device.set_limit(TOTAL - 32 * MIB)
    assert not told[-1]
    saver.demote(tag)
    device.balance()
    assert told[-1] == 2 and gpu.fraction == 1.0
    flushes = gpu.flushes
    assert device.give_back() and gpu.flushes == flushes + 1
    gpu.is_capturing = True
    assert not device.give_back()
    gpu.is_capturing = False
    device.set_limit(256 * MIB)
    with device.making(trims=False):
        assert told[-1]
    assert not told[-1]
    with monkeypatch.context() as pools:
        pools.setattr(devices.registry, "dissolved", lambda: [(types.SimpleNamespace(overflow=1), "a pool")])
        device.balance()
        assert told[-1] == 1
    device.set_limit(256 * MIB, is_whole=True)
    assert not told[-1] and not device.give_back()
    del kept


def test_torch_may_reserve_less_after_the_programs_own_resume(gpu, device, saver, tag, monkeypatch):
    extension = types.SimpleNamespace(follow_cuda=lambda *_: None, leave_cuda=lambda: None)
    for name in ("prefer", "prefer_no_more"):
        monkeypatch.setattr(devices.expandable_segments, name, lambda: None)
    device.attach(extension)
    with saver.region(tag):
        kept = torch.ones(64 * MIB, dtype=torch.uint8)
    device.set_limit(256 * MIB)
    before = gpu.fraction
    saver.pause(tag)
    device.balance()
    assert gpu.fraction > before
    saver.resume(tag)
    assert gpu.fraction == before
    device.release(extension)
    device.release(extension)
    device.set_limit(256 * MIB)
    saver.pause(tag)
    device.balance()
    saver.resume(tag)
    assert gpu.fraction > before, "LMS is off"
    del kept
