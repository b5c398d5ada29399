"""Memory for which the device has no room: for each policy, each call, and each kind of client.

Every client writes and reads all memory that it allocates.
"""

import re
import sys

import pytest
from ebbtide.launch.preloading import TMS_LIBRARY_NAMES, compat_path
from preload_clients import MIB, WAYS, Clients

OUT_OF_MEMORY = 2
SUMMARY = r"ebbtide: summary of \S+ \(PID \d+\): "
LIMIT = {"EBBTIDE_DEVICE_LIMIT": str(24 * MIB), "EBBTIDE_RESERVE": "0"}
# 36 MiB: one and a half times the limit.
BLOCKS = (6, 6 * MIB)


@pytest.mark.parametrize("way", WAYS)
def test_a_client_goes_on_past_the_limit(each_clients: Clients, way: str) -> None:
    done = each_clients.run(way, "fill", "alloc", *BLOCKS, **LIMIT)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"free {24 * MIB} before, {24 * MIB} after\n"
    assert len(done.stderr.splitlines()) == 1
    assert re.match(r"ebbtide: device 0 is full: 6 MiB of 6 MiB of tag .overflow. lie in ", done.stderr)


@pytest.mark.parametrize("way", WAYS)
def test_without_overflow_it_fails_with_the_plain_error_and_one_line(clients: Clients, way: str) -> None:
    done = clients.run(way, "fill", "alloc", *BLOCKS, EBBTIDE_OVERFLOW="none", **LIMIT)
    assert done.returncode == OUT_OF_MEMORY
    own = [line for line in done.stderr.splitlines() if line.startswith("ebbtide: ")]
    assert len(own) == 1
    assert "cuMemAlloc: device 0 has too little memory: 6 MiB wanted" in own[0]
    assert "device_limit 24 MiB, of which 24 MiB are taken. With EBBTIDE_OVERFLOW=split, what does not" in own[0]


def test_without_overflow_the_line_names_the_margin(clients: Clients) -> None:
    done = clients.run("linked", "fill", "alloc", *BLOCKS, EBBTIDE_OVERFLOW="none", EBBTIDE_DEVICE_MARGIN="1TiB")
    assert "no device_limit, 0 bytes taken, device_margin 1 TiB. With" in done.stderr


@pytest.mark.parametrize("name", TMS_LIBRARY_NAMES)
def test_under_a_name_of_torch_memory_saver_only_the_variable_brings_overflow(clients: Clients, name: str) -> None:
    library = str(compat_path() / name)
    done = clients.run("cudart12", "fill", "alloc", *BLOCKS, preload=library, **LIMIT)
    assert done.returncode == OUT_OF_MEMORY and "device 0 has too little memory" in done.stderr
    done = clients.run("cudart12", "fill", "alloc", *BLOCKS, preload=library, EBBTIDE_OVERFLOW="split", **LIMIT)
    assert done.returncode == 0, done.stderr


@pytest.mark.sim_only
@pytest.mark.parametrize("way", WAYS)
def test_without_the_library_it_fails(clients: Clients, way: str) -> None:
    assert clients.run(way, "fill", "alloc", 12, 6 * MIB, preload=None).returncode == OUT_OF_MEMORY


@pytest.mark.sim_only
@pytest.mark.parametrize("policy", ["split", "whole", "managed"])
@pytest.mark.parametrize("call", ["alloc", "pitch", "async", "pool", "mapped"])
def test_a_full_device_overflows_without_a_limit(clients: Clients, call: str, policy: str) -> None:
    """36 MiB on a device of 24 MiB."""
    device = {"EBBTIDE_SIM_CAPACITY": str(24 * MIB), "EBBTIDE_RESERVE": "0"}
    done = clients.run("cudart12", "fill", call, *BLOCKS, EBBTIDE_OVERFLOW=policy, **device)
    assert (done.returncode, done.stdout) == (0, f"free {24 * MIB} before, {24 * MIB} after\n"), done.stderr


MARGIN = {"EBBTIDE_DEVICE_MARGIN": "40MiB", "EBBTIDE_RESERVE": "0"}  # leaves 24 of 64 MiB


@pytest.mark.sim_only
@pytest.mark.parametrize("call", ["alloc", "pitch", "async", "pool", "mapped"])
@pytest.mark.parametrize("policy", ["split", "whole", "managed"])
def test_a_margin_is_left_free(clients: Clients, call: str, policy: str) -> None:
    done = clients.run("cudart12", "fill", call, *BLOCKS, EBBTIDE_OVERFLOW=policy, **MARGIN)
    assert (done.returncode, done.stdout) == (0, f"free {64 * MIB} before, {64 * MIB} after\n"), done.stderr
    assert "device 0 is full" in done.stderr


@pytest.mark.sim_only
@pytest.mark.parametrize("call", ["alloc", "pitch", "async", "pool", "mapped"])
@pytest.mark.parametrize("is_pauseable", ["0", "1"])
def test_without_overflow_a_margin_is_the_plain_error(clients: Clients, call: str, is_pauseable: str) -> None:
    settings = {"EBBTIDE_OVERFLOW": "none", "EBBTIDE_PAUSEABLE": is_pauseable, **MARGIN}
    done = clients.run("cudart12", "fill", call, *BLOCKS, **settings)
    assert done.returncode == OUT_OF_MEMORY, done.stderr
    assert "device_margin" in done.stderr or is_pauseable == "1"
    fits = clients.run("cudart12", "fill", call, 4, 6 * MIB, **settings)
    assert fits.returncode == 0, fits.stderr


CALLS = ("alloc", "pitch", "async", "pool", "mapped")
POLICIES = ("split", "whole", "managed")
# Every call by every policy with one way, and every other pair of these once.
WAYS_TO_OVERFLOW = [
    *(("cudart12", call, policy, is_pauseable) for call in CALLS for policy in POLICIES for is_pauseable in "01"),
    *(
        (way, call, POLICIES[(number + which) % 3], "01"[number % 2])
        for which, way in enumerate(("linked", "names", "cudart11", "per-thread"))
        for number, call in enumerate(CALLS)
    ),
]


@pytest.mark.parametrize(("way", "call", "policy", "is_pauseable"), WAYS_TO_OVERFLOW)
def test_every_call_overflows_by_every_policy(
    clients: Clients, way: str, call: str, policy: str, is_pauseable: str
) -> None:
    settings = {"EBBTIDE_OVERFLOW": policy, "EBBTIDE_PAUSEABLE": is_pauseable, "EBBTIDE_PAUSEABLE_ALL": "1", **LIMIT}
    done = clients.run(way, "fill", call, *BLOCKS, **settings)
    assert (done.returncode, done.stdout) == (0, f"free {24 * MIB} before, {24 * MIB} after\n"), done.stderr


def test_a_large_block_is_split_and_a_whole_one_lies_on_the_host(clients: Clients) -> None:
    split = clients.run("linked", "take", "alloc", 32 * MIB, **LIMIT)
    whole = clients.run("linked", "take", "alloc", 16 * MIB, EBBTIDE_OVERFLOW="whole", **LIMIT)
    small = clients.run("linked", "take", "alloc", 12 * MIB, EBBTIDE_OVERFLOW="whole", **LIMIT)
    assert [int(word) // MIB for word in split.stdout.split()] == [24, 0, 24]
    assert [int(word) // MIB for word in whole.stdout.split()] == [24, 24, 24]
    assert [int(word) // MIB for word in small.stdout.split()] == [24, 12, 24]


@pytest.mark.device_memory
def test_a_split_keeps_the_reserve(clients: Clients) -> None:
    done = clients.run("linked", "take", "alloc", 96 * MIB, EBBTIDE_RESERVE=str(16 * MIB))
    before, with_it, after = (int(word) for word in done.stdout.split())
    assert done.returncode == 0, done.stderr
    assert before == after
    assert with_it >= 16 * MIB


# The last 4 of the 128 MiB are for small allocations.
ROOMY = {"EBBTIDE_DEVICE_LIMIT": str(128 * MIB), "EBBTIDE_SIM_CAPACITY": str(256 * MIB)}


@pytest.mark.device_memory
@pytest.mark.parametrize("is_pauseable", ["0", "1"])
@pytest.mark.parametrize("call", ["alloc", "pitch", "async", "pool"])
@pytest.mark.parametrize("way", ["linked", "cudart12"])
def test_small_ones_stay_on_the_device_where_large_ones_spill(
    clients: Clients, way: str, call: str, is_pauseable: str
) -> None:
    """Large allocations of 20 MiB fill 124 MiB; the seventh is split."""
    settings = {**ROOMY, "EBBTIDE_PAUSEABLE": is_pauseable, "EBBTIDE_PAUSEABLE_ALL": "1"}
    done = clients.run(way, "mixed", call, 7, 20 * MIB, 2 * MIB, **settings)
    assert (done.returncode, done.stdout) == (0, "2 2 0 0 0 0 0 free 128\n"), done.stderr


@pytest.mark.device_memory
@pytest.mark.parametrize(("policy", "said"), [("split", "2 0"), ("whole", "2 2"), ("managed", "2 0")])
def test_native_memory_leaves_them_their_room(clients: Clients, policy: str, said: str) -> None:
    """Each of 31 blocks of 4 MiB fits. With whole, the last takes more than its share, and the last small one, too."""
    done = clients.run("cudart12", "mixed", "alloc", 33, 4 * MIB, 2 * MIB, EBBTIDE_OVERFLOW=policy, **ROOMY)
    # The first small one is half a large block, and not shown.
    assert (done.returncode, done.stdout) == (0, f"{said} 0 0 0 0 0 free 128\n"), done.stderr


@pytest.mark.parametrize(("large", "said"), [(4, "2 0 0 0 0 0 0"), (20, "2 2 2 2 0 0 0")])
def test_handles_leave_it_too_unless_they_are_larger_than_it(clients: Clients, large: int, said: str) -> None:
    done = clients.run("cudart12", "mixed", "mapped", 132 // large + 1, large * MIB, 2 * MIB, **ROOMY)
    assert (done.returncode, done.stdout) == (0, f"{said} free 128\n"), done.stderr


@pytest.mark.sim_only
@pytest.mark.parametrize(("policy", "said"), [("split", "2 2 0 0"), ("whole", "2 2 2 2"), ("managed", "2 2 2 2")])
def test_large_ones_leave_the_reserve_of_a_full_device(clients: Clients, policy: str, said: str) -> None:
    """64 MiB in blocks of 6 MiB. With split, the driver's own memory serves them until it is full; 8 MiB of the
    remaining memory, half the reserve, are not for large allocations."""
    settings = {"EBBTIDE_OVERFLOW": policy, "EBBTIDE_RESERVE": str(16 * MIB)}
    done = clients.run("linked", "mixed", "alloc", 11, 6 * MIB, 2 * MIB, **settings)
    assert (done.returncode, done.stdout) == (0, f"{said} 0 0 0 free 64\n"), done.stderr


@pytest.mark.parametrize("policy", ["split", "whole", "managed", "none"])
@pytest.mark.parametrize("call", ["alloc", "mapped"])
def test_what_fits_the_limit_is_never_refused_for_want_of_host_memory(clients: Clients, call: str, policy: str) -> None:
    settings = {**ROOMY, "EBBTIDE_OVERFLOW": policy, "EBBTIDE_HOST_LIMIT": "0"}
    done = clients.run("linked", "take", call, 128 * MIB, **settings)
    assert [int(word) // MIB for word in done.stdout.split()] == [128, 0, 128], done.stderr
    full = clients.run("linked", "fill", call, 32, 4 * MIB, **settings)
    assert full.returncode == 0, full.stderr


@pytest.mark.parametrize("policy", ["split", "whole", "managed"])
def test_the_host_budget_bounds_what_spills(clients: Clients, policy: str) -> None:
    """One line with the need, the free memory and the limit, and the plain error of the call."""
    done = clients.run("names", "fill", "alloc", *BLOCKS, EBBTIDE_OVERFLOW=policy, EBBTIDE_HOST_LIMIT="4MiB", **LIMIT)
    own = [line for line in done.stderr.splitlines() if line.startswith("ebbtide: ")]
    assert done.returncode == OUT_OF_MEMORY
    assert len(own) == 1, done.stderr
    assert all(word in own[0] for word in ("6 MiB", "free", "limit 4 MiB"))


@pytest.mark.sim_only
@pytest.mark.parametrize("policy", ["split", "whole", "managed", "none"])
def test_a_program_that_probes_fills_no_log(clients: Clients, policy: str) -> None:
    settings = {"EBBTIDE_OVERFLOW": policy, "EBBTIDE_HOST_LIMIT": "4MiB", "EBBTIDE_LOG": "error"}
    done = clients.run("linked", "probe", 96 * MIB, **(LIMIT | settings))
    assert done.returncode == 0, done.stderr
    assert len(done.stderr.splitlines()) == 8 + 3  # up to the 64th of 100


@pytest.mark.sim_only
@pytest.mark.parametrize("reserve", ["0", "16MiB"])
@pytest.mark.parametrize("policy", ["split", "whole", "managed", "none"])
def test_what_fits_the_device_is_never_refused_for_want_of_host_memory(
    clients: Clients, policy: str, reserve: str
) -> None:
    settings = {"EBBTIDE_OVERFLOW": policy, "EBBTIDE_HOST_LIMIT": "4MiB", "EBBTIDE_RESERVE": reserve}
    done = clients.run("linked", "take", "alloc", 24 * MIB, EBBTIDE_SIM_CAPACITY=str(24 * MIB), **settings)
    assert (done.returncode, done.stdout) == (0, f"{24 * MIB} 0 {24 * MIB}\n"), done.stderr


@pytest.mark.parametrize(("call", "counted"), [("alloc", 6), ("pitch", 6), ("async", 6), ("pool", 6), ("managed", 6)])
def test_native_memory_counts_against_the_limit(clients: Clients, call: str, counted: int) -> None:
    done = clients.run("cudart12", "take", call, 6 * MIB, **LIMIT)
    assert [int(word) // MIB for word in done.stdout.split()] == [24, 24 - counted, 24], done.stderr


def test_managed_memory_is_never_refused(clients: Clients) -> None:
    done = clients.run("cudart12", "take", "managed", 32 * MIB, **LIMIT)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("size", [6 * MIB, 32 * MIB, 32 * MIB - 512])
@pytest.mark.parametrize("way", WAYS)
def test_an_allocation_looks_like_one_on_the_device(clients: Clients, way: str, size: int) -> None:
    """An allocation by the driver, and one that is split 24 to 8 MiB."""
    done = clients.run(way, "pointers", size, **LIMIT)
    assert done.returncode == 0, done.stderr
    is_split = size > 24 * MIB
    assert done.stdout == f"ipc {801 if is_split else 0}\n"
    assert ("can't be shared with another process" in done.stderr) == is_split


@pytest.mark.parametrize("size", [6 * MIB, 32 * MIB])
def test_free_waits_for_the_device(clients: Clients, size: int) -> None:
    done = clients.run("linked", "free-waits", size, **LIMIT)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("policy", ["split", "whole", "managed"])
@pytest.mark.parametrize("size", [6 * MIB, 32 * MIB])
@pytest.mark.parametrize("way", ["linked", "per-thread"])
def test_a_free_in_the_order_of_a_stream_comes_after_its_work(
    clients: Clients, way: str, size: int, policy: str
) -> None:
    done = clients.run(way, "free-in-order", size, EBBTIDE_OVERFLOW=policy, **LIMIT)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("policy", "times"), [("split", "once"), ("whole", "once"), ("managed", "once"), ("managed", "twice")]
)
@pytest.mark.parametrize("way", ["linked", "per-thread"])
def test_a_free_beside_a_capture_is_put_off(clients: Clients, way: str, policy: str, times: str) -> None:
    """Its bytes count until the memory is released."""
    host = {"EBBTIDE_REPORT": "total", "EBBTIDE_HOST_LIMIT": str(64 * MIB), "EBBTIDE_HOST_MARGIN": "0"}
    done = clients.run(way, "free-beside", times, 32 * MIB, EBBTIDE_OVERFLOW=policy, **LIMIT, **host)
    assert done.returncode == 0, done.stderr


@pytest.mark.sim_only
def test_deferred_frees_come_before_a_refused_allocation(clients: Clients) -> None:
    host = {"EBBTIDE_HOST_LIMIT": str(40 * MIB), "EBBTIDE_HOST_MARGIN": "0"}
    done = clients.run("linked", "put-off", 32 * MIB, EBBTIDE_OVERFLOW="managed", **LIMIT, **host)
    assert done.returncode == 0, done.stderr


@pytest.mark.sim_only
@pytest.mark.parametrize("state", ["living", "freed", "living-managed", "freed-managed"])
def test_an_address_that_is_given_again_is_new_memory(clients: Clients, state: str) -> None:
    done = clients.run("linked", "lost", state, 6 * MIB, EBBTIDE_OVERFLOW="managed", **LIMIT)
    assert done.returncode == 0, done.stderr


@pytest.mark.sim_only
@pytest.mark.parametrize("policy", ["split", "managed"])
@pytest.mark.parametrize("size", [6 * MIB, 32 * MIB])
@pytest.mark.parametrize("is_pauseable", ["0", "1"])
@pytest.mark.parametrize("way", ["cudart12", "per-thread"])
def test_a_capture_is_left_alone(clients: Clients, way: str, is_pauseable: str, size: int, policy: str) -> None:
    """A graph's allocations are left to the driver, and not even the limit prevents them. (The simulator refuses them:
    801.)"""
    done = clients.run(
        way,
        "capture",
        size,
        EBBTIDE_OVERFLOW=policy,
        EBBTIDE_PAUSEABLE=is_pauseable,
        EBBTIDE_PAUSEABLE_ALL="1",
        **LIMIT,
    )
    assert (done.returncode, done.stdout) == (0, "allocate 801\n"), done.stderr


@pytest.mark.sim_only
@pytest.mark.parametrize("way", ["linked", "cudart12"])
def test_a_stream_that_goes_takes_its_capture_along(clients: Clients, way: str) -> None:
    """Otherwise a free would be deferred for ever."""
    done = clients.run(way, "destroyed", 32 * MIB, **LIMIT)
    assert (done.returncode, done.stdout) == (0, f"{24 * MIB} {24 * MIB}\n"), done.stderr


@pytest.mark.parametrize("action", ["begins", "two-captures"])
@pytest.mark.parametrize("policy", ["split", "managed"])
@pytest.mark.parametrize("way", ["linked", "per-thread"])
def test_captures_are_remembered_as_long_as_they_run(clients: Clients, way: str, policy: str, action: str) -> None:
    """A capture that does not begin must not be remembered, or frees would wait for it for ever."""
    host = {"EBBTIDE_REPORT": "total", "EBBTIDE_HOST_LIMIT": str(64 * MIB), "EBBTIDE_HOST_MARGIN": "0"}
    done = clients.run(way, action, 32 * MIB, EBBTIDE_OVERFLOW=policy, **LIMIT, **host)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("policy", ["split", "whole", "managed", "none"])
@pytest.mark.parametrize("way", ["linked", "cudart12"])
def test_what_the_driver_refuses_is_refused_as_by_the_driver(clients: Clients, way: str, policy: str) -> None:
    plain = clients.run(way, "wrong", preload=None)
    hooked = clients.run(way, "wrong", EBBTIDE_OVERFLOW=policy)
    assert (hooked.returncode, hooked.stdout) == (plain.returncode, plain.stdout)


@pytest.mark.sim_only
@pytest.mark.parametrize("policy", ["split", "whole", "managed", "none"])
@pytest.mark.parametrize("is_pauseable", ["0", "1"])
@pytest.mark.parametrize("call", ["alloc", "async", "mapped"])
def test_any_failing_call_leaves_everything_as_it_was(
    clients: Clients, call: str, policy: str, is_pauseable: str
) -> None:
    """Each driver call of an allocation that overflows fails once. The call returns an error, and nothing stays
    held."""
    done = clients.run(
        "cudart12",
        "faults",
        call,
        32 * MIB,
        EBBTIDE_REPORT="total",
        EBBTIDE_HOST_LIMIT=str(64 * MIB),
        EBBTIDE_HOST_MARGIN="0",
        EBBTIDE_OVERFLOW=policy,
        EBBTIDE_PAUSEABLE=is_pauseable,
        EBBTIDE_PAUSEABLE_ALL="1",
        EBBTIDE_LOG="error",
        **LIMIT,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) >= 3


@pytest.mark.parametrize("policy", ["split", "whole", "managed"])
def test_the_first_spill_says_so_and_the_summary_counts(clients: Clients, policy: str) -> None:
    done = clients.run("names", "fill", "alloc", *BLOCKS, EBBTIDE_OVERFLOW=policy, EBBTIDE_SUMMARY="1", **LIMIT)
    first, summary = done.stderr.splitlines()
    assert first.startswith("ebbtide: device 0 is full: 6 MiB")
    went = r"at most \d+ MiB on device 0; \d+ MiB of \d+ allocations? went to the host, 0 bytes were promoted"
    assert re.fullmatch(SUMMARY + went, summary), summary


def test_the_summary_of_what_fits(clients: Clients) -> None:
    done = clients.run("names", "take", "alloc", 6 * MIB, EBBTIDE_SUMMARY="1", EBBTIDE_LOG="error")
    assert re.fullmatch(SUMMARY + r"at most \d+ MiB on device 0; nothing overflowed to the host\n", done.stderr), (
        done.stderr
    )


def test_the_summary_of_a_program_that_never_asked_for_memory(clients: Clients) -> None:
    """It has the driver's library, and calls nothing of it. A program without the library says nothing."""
    load = "import ctypes, os; ctypes.CDLL('libcuda.so.1'); pid = os.fork(); pid and os.waitpid(pid, 0)"
    done = clients.start([sys.executable, "-c", load], EBBTIDE_SUMMARY="1")
    assert re.fullmatch(SUMMARY + "it never asked CUDA for device memory\n", done.stderr), done.stderr
    assert clients.start([sys.executable, "-c", load], EBBTIDE_SUMMARY="0").stderr == ""
    assert clients.start([sys.executable, "-c", "pass"], EBBTIDE_SUMMARY="1").stderr == ""


def test_the_host_pool_is_made_ahead_and_used(clients: Clients) -> None:
    """The pool counts in the host budget: with it, 64 MiB are held before anything spills."""
    pool = {"EBBTIDE_HOST_POOL": str(64 * MIB), "EBBTIDE_HOST_LIMIT": str(80 * MIB), "EBBTIDE_HOST_MARGIN": "0"}
    done = clients.run("names", "take", "alloc", 6 * MIB, EBBTIDE_REPORT="total", **pool, **LIMIT)
    assert [int(word) // MIB for word in done.stdout.split()] == [24 + 80, 18 + 16, 24 + 16], done.stderr
