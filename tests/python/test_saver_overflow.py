"""Regions that overflow: memory for which the device has no room is host memory behind the same address."""

import pytest

torch = pytest.importorskip("torch")

import caches  # noqa: E402
from core_sim import set_limit  # noqa: E402
from ebbtide import _core  # noqa: E402
from ebbtide.errors import OutOfMemoryError, StateError  # noqa: E402
from ebbtide.saver.regions import startup  # noqa: E402
from ebbtide.saver.values.arguments import overflow_code  # noqa: E402
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from random_memory import random_bytes  # noqa: E402

MIB = 1 << 20


@pytest.fixture
def room(saver):
    """`room(mib)` leaves this much of device_limit for the next allocations. The limits are reset after the test."""

    def leave(mib, keeps_cached=False):
        if not keeps_cached:  # torch would otherwise release what earlier tests left
            caches.release(saver)
        held = _core.query_device(0).held_bytes
        saver.configure(device_limit=held + mib * MIB, reserve=0)

    yield leave
    saver.configure(device_limit=None, reserve=None, host_pool=0)


def noise(saver, tag, mib, **options):
    with saver.region(tag, **options):
        return random_bytes(mib * MIB, saver.device)


def spilled(saver, tag):
    return saver.tags()[tag].host_bytes


def test_what_does_not_fit_spills(saver, tag, room):
    room(16)
    before = saver.stats()
    tensor = noise(saver, tag, 40, overflow="split")
    want = tensor.cpu().clone()
    status = saver.tags()[tag]
    assert (status.host_bytes, status.resident_bytes, status.state) == (24 * MIB, 40 * MIB, "resident")
    assert "host" in str(saver.tags())
    tensor += 1
    assert torch.equal(tensor.cpu(), want + 1)
    after = saver.stats()
    assert after["spills"] - before["spills"] == 1
    assert after["bytes_spilled"] - before["bytes_spilled"] == 24 * MIB
    assert after["host_bytes"] - before["host_bytes"] == 24 * MIB
    assert after["device_bytes"] - before["device_bytes"] == 16 * MIB


def test_small_tensors_stay_on_the_device_where_large_ones_spill(saver, tag, tag2, room):
    """The last 4 of the 128 MiB are for torch's segments of 2 MiB."""
    room(0)
    held = saver.stats()["device_bytes"]
    saver.configure(device_limit=held + 128 * MIB, reserve=8 * MIB)
    large = noise(saver, tag, 160, overflow="split")
    with saver.region(tag2, overflow="split"):
        small = [torch.ones(256 << 10, device=saver.device) for _ in range(4)]  # two in each segment
    assert spilled(saver, tag) >= 36 * MIB
    assert spilled(saver, tag2) == 0
    assert all(bool((tensor == 1).all()) for tensor in small)
    del large, small


def test_without_a_policy_it_is_out_of_memory(saver, tag, room):
    room(16)
    with pytest.raises((torch.OutOfMemoryError, RuntimeError), match="out of memory"):
        noise(saver, tag, 40)


def test_whole_never_splits(saver, tag, tag2, room):
    room(40)
    noise_large = noise(saver, tag, 26, overflow="whole")
    noise_small = noise(saver, tag2, 24, overflow="whole")
    assert (spilled(saver, tag), spilled(saver, tag2)) == (26 * MIB, 0)
    del noise_large, noise_small


def test_a_spilled_tag_pauses_and_resumes(saver, tag, room):
    room(16)
    tensor = noise(saver, tag, 40, overflow="split")
    want, address = tensor.cpu().clone(), tensor.data_ptr()
    report = saver.pause(tag)
    assert report.bytes == 16 * MIB, "what lies on the host takes no device memory"
    assert not [held for held in report.remaining if held.tag == tag]
    assert spilled(saver, tag) == 24 * MIB
    assert saver.is_paused(tag)
    with pytest.raises(StateError, match="spilled"):
        saver.backup_of(tensor)
    assert saver.resume(tag).bytes == 16 * MIB
    assert tensor.data_ptr() == address and torch.equal(tensor.cpu(), want)


def test_promote_moves_what_fits(saver, tag, room):
    room(16)
    tensor = noise(saver, tag, 52, overflow="split")  # host chunks of 32 and 4 MiB
    want, address = tensor.cpu().clone(), tensor.data_ptr()
    assert saver.promote(tag).bytes == 0
    room(32)
    report = saver.promote(tag)
    assert (report.kind, report.bytes, report.copied) == ("promote", 32 * MIB, 32 * MIB)
    assert "claimed 32.0 MiB" in str(report)
    assert spilled(saver, tag) == 4 * MIB
    room(100)
    assert saver.promote().bytes >= 4 * MIB
    assert spilled(saver, tag) == 0
    assert tensor.data_ptr() == address and torch.equal(tensor.cpu(), want)
    assert [event.kind for event in saver.timeline if event.tags == tag] == ["promote", "promote"]


def test_promote_refuses_open_regions_and_unknown_tags(saver, tag):
    with saver.region(tag, overflow="split"), pytest.raises(StateError, match="inside its region"):
        saver.promote(tag)
    with pytest.raises(StateError, match="no region was ever named"):
        saver.promote("nobody")
    assert saver.promote("nobody", missing_ok=True).bytes == 0


def test_cached_memory_goes_before_anything_spills(saver, tag, room):
    room(40)
    with saver.region(tag, overflow="split"):
        cached = torch.zeros(32 * MIB, dtype=torch.uint8, device=saver.device)
        del cached
        tensor = torch.zeros(40 * MIB, dtype=torch.uint8, device=saver.device)
    assert spilled(saver, tag) == (0 if startup.backend().flushes_first else 32 * MIB)
    assert tensor.numel() == 40 * MIB


def test_a_host_that_is_full_is_out_of_memory(saver, tag, room):
    room(16)
    saver.configure(host_limit=_core.stats()["host_held_bytes"] + 8 * MIB)
    with pytest.raises((torch.OutOfMemoryError, RuntimeError), match="out of memory"):
        noise(saver, tag, 40, overflow="split")
    saver.configure(host_limit=None)
    assert spilled(saver, tag) == 0
    tensor = noise(saver, tag, 40, overflow="split")
    assert spilled(saver, tag) == 24 * MIB
    del tensor


def test_a_host_that_is_full_is_one_line(run_python):
    """In a process of its own: of many such lines most are left out."""
    done = run_python("""
        import torch
        from ebbtide import _core, saver
        assert saver.device
        limit = _core.stats()["host_held_bytes"] + (8 << 20)
        saver.configure(device_limit="16MiB", reserve=0, host_limit=limit)
        try:
            with saver.region("large", overflow="split"):
                torch.empty(40 << 20, dtype=torch.uint8, device=saver.device)
        except (torch.OutOfMemoryError, RuntimeError):
            pass
    """)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "can't spill" in line]
    assert "needs 24 MiB of host memory; 8 MiB are free for it (limit " in line and "change host_limit" in line


@pytest.mark.device_memory
def test_a_host_that_is_full_does_not_open_the_reserve(saver, tag, tag2, room):
    room(64)
    info = _core.query_device(0)
    saver.configure(reserve=info.free_bytes - 4 * MIB, host_limit=_core.stats()["host_held_bytes"])
    try:
        with pytest.raises((torch.OutOfMemoryError, RuntimeError), match="out of memory"):
            noise(saver, tag, 12, overflow="split")
        assert noise(saver, tag2, 12).numel() == 12 * MIB  # without a policy
    finally:
        saver.configure(reserve=None, host_limit=None)


def test_the_core_raises_with_numbers(saver, tag, room):
    room(4)
    saver.configure(host_limit=_core.stats()["host_held_bytes"] + 2 * MIB)
    with pytest.raises(OutOfMemoryError) as caught:
        _core.alloc(tag, 8 * MIB, overflow=overflow_code("split"))
    assert caught.value.requested_bytes == 8 * MIB


def test_after_a_spike_free_memory_is_on_the_device_again(saver, tag, room):
    room(16)
    spike = noise(saver, tag, 40, overflow="split")
    address = spike.data_ptr()
    del spike
    room(64)
    with saver.region(tag, overflow="split"):
        assert spilled(saver, tag) == 0
        again = torch.zeros(40 * MIB, dtype=torch.uint8, device=saver.device)
    assert again.data_ptr() == address
    assert int(torch.count_nonzero(again)) == 0


def test_what_lives_keeps_its_spilled_segment(saver, tag, room):
    room(16)
    tensor = noise(saver, tag, 40, overflow="split")
    want = tensor.cpu().clone()
    room(64)
    with saver.region(tag, overflow="split"):
        assert spilled(saver, tag) == 24 * MIB
    assert torch.equal(tensor.cpu(), want)


def test_trim_and_promote_give_up_free_spilled_segments(saver, tag, room):
    room(16)
    spike = noise(saver, tag, 40, overflow="split")
    del spike
    assert saver.trim(tag).bytes == 16 * MIB
    assert spilled(saver, tag) == 0
    with saver.region(tag, overflow="split"):
        assert spilled(saver, tag) == 0
    spike = noise(saver, tag, 40, overflow="split")
    del spike
    assert saver.promote(tag).bytes == 0
    assert spilled(saver, tag) == 0


def test_the_pool_is_made_ahead_and_reused(saver, tag, tag2, room):
    saver.configure(host_pool="64MiB")
    noise(saver, tag2, 2, overflow="split")  # the first region fills the pool, unless it is full already
    assert _core.stats()["host_pool_bytes"] == 64 * MIB
    room(0)
    tensor = noise(saver, tag, 64, overflow="split")
    assert _core.stats()["host_pool_bytes"] == 0
    del tensor
    saver.trim(tag)
    assert _core.stats()["host_pool_bytes"] == 64 * MIB
    saver.configure(host_pool=0)
    assert _core.stats()["host_pool_bytes"] == 0


def test_regions_say_their_policy(saver, tag):
    assert repr(saver.region(tag, overflow="split")).endswith("overflow='split')")
    assert "overflow" not in repr(saver.region(tag))
    for bad in ("managed", "", 1, True):
        with pytest.raises(ValueError, match="overflow"):
            saver.region(tag, overflow=bad)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"host_pool": None}, TypeError),
        ({"shared_handle": None}, TypeError),
        ({"reserve": "much"}, ValueError),
    ],
)
def test_bad_configurations(saver, arguments, error):
    with pytest.raises(error, match=next(iter(arguments))):
        saver.configure(**arguments)


def test_variables_set_what_configure_sets(run_python, driver_name):
    result = run_python(
        """
        import torch
        from ebbtide import _core, saver
        with saver.region("w", overflow="split"):
            pass
        for name in ("reserve", "host_pool", "shared_handle"):
            print(_core.get_setting(name).decode())
        print(_core.stats()["host_pool_bytes"])
        """,
        EBBTIDE_DRIVER=driver_name,
        EBBTIDE_RESERVE="3MiB",
        EBBTIDE_HOST_POOL="130MiB",
        EBBTIDE_SHARED_HANDLE="64MiB",
    )
    expected = [str(3 * MIB), str(130 * MIB), str(64 * MIB), str(128 * MIB)]
    assert result.stdout.split() == expected, result.stderr


def test_two_processes_share_one_host_limit(run_python, driver_name, tmp_path):
    program = """
        import os, sys, torch
        from ebbtide import _core, saver
        from ebbtide.saver.values.arguments import overflow_code
        def take():
            saver.configure(device_limit=0, host_limit="24MiB", host_margin=0)
            with saver.region("w", overflow="split"):
                pass
            return _core.alloc("w", 16 << 20, overflow=overflow_code("split"))
        def child_that_takes():  # once it is told to
            reader, writer = os.pipe()
            child = os.fork()
            if child == 0:
                os.read(reader, 1)
                take()
                sys.exit(0)
            def tell():
                os.write(writer, b"!")
                return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            return tell
        beside, alone = child_that_takes(), child_that_takes()  # before this process uses ebbtide
        mine = take()
        print("beside:", beside())
        _core.free(mine)
        print("alone:", alone())
        """
    result = run_python(
        program, EBBTIDE_DRIVER=driver_name, EBBTIDE_LEDGER=str(tmp_path / "ledger"), EBBTIDE_LOG="warning"
    )
    assert "other processes of this run hold" in result.stderr, result.stdout + result.stderr
    assert result.stdout == "beside: 1\nalone: 0\n"


def test_off_promotes_nothing(run_python):
    result = run_python(
        """
        from ebbtide import saver
        with saver.region("w", overflow="split"):
            pass
        print(saver.promote("w"))
        """,
        EBBTIDE_DRIVER="off",
    )
    assert result.stdout.startswith("promote: claimed 0"), result.stderr


GRANULE = 2 * MIB


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(1, 12), st.integers(0, 10)), min_size=1, max_size=6))
def test_property_the_device_is_full_before_anything_spills(saver, sizes):
    assert saver.device
    held = _core.query_device(0).held_bytes
    set_limit("reserve", 0)
    addresses = []
    try:
        for units, room_units in sizes:
            set_limit("device_limit", _core.query_device(0).held_bytes + room_units * GRANULE)
            addresses.append(_core.alloc("property-overflow", units * GRANULE, overflow=overflow_code("split")))
            info = _core.find(addresses[-1])
            assert info.host_bytes == max(0, units - room_units) * GRANULE
            assert info.resident_bytes == info.size_bytes == units * GRANULE
    finally:
        set_limit("device_limit", _core.UNLIMITED)
        set_limit("reserve", _core.UNLIMITED)
        for address in addresses:
            _core.free(address)
    assert _core.query_device(0).held_bytes == held
