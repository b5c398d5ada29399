"""csrc/preload/hooks.def is the single source: cuda.h, the driver and the pages agree with it."""

import ctypes
import re
from pathlib import Path

import pytest
from checks.names import RESOLVERS, exported_driver_names, read_hook_rows, read_hooks, typed_versions
from checks.toolchain import find_cuda_include

# What cuGetProcAddress is asked for the plain and the per-thread-stream function with.
FLAGS = {"DEFAULT": 0, "LEGACY_STREAM": 1, "PER_THREAD_DEFAULT_STREAM": 2}


def find_faults(hooks_def: Path, cuda_include: Path) -> list[str]:
    """The differences between the list and cuda.h."""
    rows = [row for row in read_hook_rows(hooks_def) if row[0] not in RESOLVERS]
    names = {name for _, name, _, _ in rows}
    typed = typed_versions(names, cuda_include)
    symbols = exported_driver_names(names, cuda_include)
    faults = []
    for symbol, name, version, flags in rows:
        if name not in typed:
            faults.append(f"{name} is no function of cuda.h")
            continue
        wanted = symbols[name] + ("_ptsz" if flags == "PER_THREAD_DEFAULT_STREAM" else "")
        if symbol != wanted:
            faults.append(f"{symbol}: cuda.h's name for {name} is {wanted}")
        if version != typed[name]:
            faults.append(f"{symbol} is asked for at {version}, but cuda.h's type is that of {typed[name]}")
    return faults


def test_list_agrees_with_cuda_h(root: Path) -> None:
    assert find_faults(root / "csrc/preload/hooks.def", find_cuda_include()) == []


def test_the_resolver_gives_what_the_name_gives(root: Path, driver: ctypes.CDLL) -> None:
    """On either driver: this is what substitution by identity rests on."""
    differing, found = [], set()
    for symbol, name, version, flags in read_hook_rows(root / "csrc/preload/hooks.def"):
        if not hasattr(driver, symbol):
            continue
        address = ctypes.c_void_p()
        code = driver.cuGetProcAddress_v2(
            name.encode(), ctypes.byref(address), version, ctypes.c_uint64(FLAGS[flags]), None
        )
        by_name = ctypes.cast(getattr(driver, symbol), ctypes.c_void_p).value
        found.add(symbol)
        if code != 0 or address.value != by_name:
            differing.append(symbol)
    assert differing == []
    # Newer than the oldest driver, or of per-thread streams, which the simulator has few of.
    missing = read_hooks(root / "csrc/preload/hooks.def") - found
    assert {name for name in missing if name.startswith("cu") and not name.endswith("_ptsz")} <= {
        "cuStreamBeginCaptureToGraph"
    }


@pytest.fixture(scope="module")
def driver(driver_name: str) -> ctypes.CDLL:
    if driver_name == "cuda":
        return ctypes.CDLL("libcuda.so.1")
    import ebbtide

    assert ebbtide.__file__
    return ctypes.CDLL(str(Path(ebbtide.__file__).parent / "libebbtide_sim.so"))


def test_the_page_names_every_hook(root: Path) -> None:
    page = (root / "docs/preload.md").read_text()
    hooks = read_hooks(root / "csrc/preload/hooks.def") | {"dlsym"}
    assert hooks - set(re.findall(r"`(\w+)`", page)) == set()


# --- the checks above, seen to fail ---


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ("EBBTIDE_DRIVER_HOOK(cuMemAlloc, cuMemAlloc, 3020, CU_GET_PROC_ADDRESS_DEFAULT)", "name for cuMemAlloc is"),
        ("EBBTIDE_DRIVER_HOOK(cuMemFree_v2, cuMemFree, 2000, CU_GET_PROC_ADDRESS_DEFAULT)", "cuda.h's type is that"),
        ("EBBTIDE_DRIVER_HOOK(cuNoSuch, cuNoSuch, 3020, CU_GET_PROC_ADDRESS_DEFAULT)", "no function of cuda.h"),
        (
            "EBBTIDE_DRIVER_HOOK(cuMemFreeAsync, cuMemFreeAsync, 11020, CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM)",
            "cuMemFreeAsync_ptsz",
        ),
    ],
)
def test_a_planted_row_is_found(tmp_path: Path, row: str, complaint: str) -> None:
    planted = tmp_path / "hooks.def"
    good = "EBBTIDE_DRIVER_HOOK(cuMemAlloc_v2, cuMemAlloc, 3020, CU_GET_PROC_ADDRESS_DEFAULT)\n"
    planted.write_text(good)
    assert find_faults(planted, find_cuda_include()) == []
    planted.write_text(good + row + "\n")
    assert [complaint in fault for fault in find_faults(planted, find_cuda_include())] == [True]


@pytest.mark.parametrize("row", ["EBBTIDE_DRIVER_HOOK(cuMemFree_v2)", "EBBTIDE_NVML_HOOK(nvmlX, 1)"])
def test_a_planted_malformed_row_is_found(tmp_path: Path, row: str) -> None:
    planted = tmp_path / "hooks.def"
    planted.write_text(row + "\n")
    with pytest.raises(ValueError, match="does not read"):
        read_hooks(planted)
