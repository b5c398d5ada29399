"""csrc/driver/functions.def is the single source: cuda.h, the table, the loader and the simulator agree with it."""

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest
from checks.names import RESOLVERS, exported_driver_names, read_driver_functions, typed_versions
from checks.toolchain import find_cuda_include

OLDEST_DRIVER = 12000  # CUDA 12.0
Resolve = Callable[[str, int], int]


def find_faults(functions_def: Path, cuda_include: Path) -> list[str]:
    """The differences between the list and cuda.h."""
    listed = read_driver_functions(functions_def)
    typed = typed_versions(set(listed), cuda_include)
    faults = [f"{name} is no function of cuda.h" for name in listed if name not in typed]
    names = [line.split("(")[1].split(",")[0] for line in functions_def.read_text().splitlines() if _is_row(line)]
    faults += [f"{name} is listed twice" for name in sorted(set(names)) if names.count(name) > 1]
    for name, (version, need) in listed.items():
        if version != typed.get(name, version):
            faults.append(f"{name} is asked for at {version}, but cuda.h's type is that of {typed[name]}")
        if need == "required" and version > OLDEST_DRIVER:
            faults.append(f"{name} came with {version} and must be optional: ebbtide serves {OLDEST_DRIVER} and newer")
        if need == "optional" and version <= OLDEST_DRIVER:
            faults.append(f"{name} is in every driver of {OLDEST_DRIVER} and newer: it must be required")
    return faults


def _is_row(line: str) -> bool:
    return line.startswith("EBBTIDE_FUNCTION(")


def find_unresolved(listed: dict[str, tuple[int, str]], symbols: dict[str, int | None], resolve: Resolve) -> list[str]:
    """Functions that a driver library lacks, or has different ones of by name and by resolver."""
    faults = []
    for name, (version, _) in listed.items():
        by_resolver = resolve(name, version)
        if not by_resolver:
            faults.append(f"cuGetProcAddress does not know {name} at {version}")
        elif by_resolver != symbols.get(name):
            faults.append(f"{name} is one function by name and another by cuGetProcAddress")
        if version > 2000 and resolve(name, version - 10) == by_resolver != 0:
            faults.append(f"cuGetProcAddress hands out {name} of {version} to who asks for an older one")
    return faults


def test_list_agrees_with_cuda_h(root: Path) -> None:
    assert find_faults(root / "csrc/driver/functions.def", find_cuda_include()) == []


def test_the_programs_list_agrees_with_cuda_h(root: Path) -> None:
    """The simulator's functions for programs only. No function is in both lists."""
    programs = root / "csrc/sim/program_functions.def"
    assert find_faults(programs, find_cuda_include()) == []
    assert not set(read_driver_functions(programs)) & set(read_driver_functions(root / "csrc/driver/functions.def"))


def test_table_and_loader_are_made_from_the_list(root: Path) -> None:
    """No second list: the table's members and the loader's loop come from the include."""
    for file in ("csrc/driver/driver.h", "csrc/driver/driver.cpp"):
        assert '#include "driver/functions.def"' in (root / file).read_text(), file


@pytest.fixture(scope="module")
def simulator() -> ctypes.CDLL:
    import ebbtide

    assert ebbtide.__file__
    return ctypes.CDLL(str(Path(ebbtide.__file__).parent / "libebbtide_sim.so"))


def resolver_of(library: ctypes.CDLL) -> Resolve:
    function = library.cuGetProcAddress_v2

    def resolve(name: str, version: int) -> int:
        address = ctypes.c_void_p()
        status = function(name.encode(), ctypes.byref(address), version, ctypes.c_uint64(0), None)
        return (address.value or 0) if status == 0 else 0

    return resolve


def symbol_addresses(library: ctypes.CDLL, names: dict[str, str]) -> dict[str, int | None]:
    """Listed name -> address of the symbol that cuda.h makes of it; None where it is missing."""
    return {
        name: ctypes.cast(getattr(library, symbol), ctypes.c_void_p).value if hasattr(library, symbol) else None
        for name, symbol in names.items()
    }


def test_simulator_hands_out_every_listed_function(root: Path, simulator: ctypes.CDLL) -> None:
    listed = read_driver_functions(root / "csrc/driver/functions.def")
    listed |= read_driver_functions(root / "csrc/sim/program_functions.def")
    symbols = symbol_addresses(simulator, exported_driver_names(set(listed), find_cuda_include()))
    resolve = resolver_of(simulator)
    assert find_unresolved(listed, symbols, resolve) == []
    assert resolve("cuNoSuchFunction", 13000) == 0
    assert all(hasattr(simulator, name) for name in RESOLVERS)
    by_version = [resolve("cuCtxCreate", version) for version in (3020, 11030, 11040, 12040, 12050, 13000)]
    shapes = symbol_addresses(simulator, {name: name for name in (f"cuCtxCreate_v{number}" for number in (2, 3, 4))})
    assert by_version == [address for address in shapes.values() for _ in range(2)]
    assert len(set(by_version)) == 3


# --- the checks above, seen to fail ---


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ("EBBTIDE_FUNCTION(cuMemCreat, 10020, required)", "no function of cuda.h"),
        ("EBBTIDE_FUNCTION(cuMemAlloc, 2000, optional)", "cuda.h's type is that of 3020"),
        ("EBBTIDE_FUNCTION(cuInit, 2000, required)", "listed twice"),
        ("EBBTIDE_FUNCTION(cuDeviceGetDevResource, 12040, required)", "must be optional"),
        ("EBBTIDE_FUNCTION(cuMemAlloc, 3020, optional)", "must be required"),
    ],
)
def test_a_planted_row_is_found(tmp_path: Path, row: str, complaint: str) -> None:
    planted = tmp_path / "functions.def"
    planted.write_text("EBBTIDE_FUNCTION(cuInit, 2000, required)\n")
    assert find_faults(planted, find_cuda_include()) == []
    planted.write_text(f"EBBTIDE_FUNCTION(cuInit, 2000, required)\n{row}\n")
    assert any(complaint in fault for fault in find_faults(planted, find_cuda_include()))


def test_a_planted_malformed_row_is_found(tmp_path: Path) -> None:
    planted = tmp_path / "functions.def"
    planted.write_text("EBBTIDE_FUNCTION(cuInit, 2000, maybe)\n")
    with pytest.raises(ValueError, match="1 lines do not read"):
        read_driver_functions(planted)


def test_a_planted_hole_in_a_driver_library_is_found() -> None:
    listed = {"cuA": (11000, "required"), "cuB": (11000, "required"), "cuC": (11000, "optional")}
    answers = {"cuB": 2, "cuC": 3}
    faults = find_unresolved(listed, {"cuB": 9, "cuC": 3}, lambda name, version: answers.get(name, 0))
    assert [fault.split()[0] for fault in faults if "older" not in fault] == ["cuGetProcAddress", "cuB"]
    assert any("cuC of 11000 to who asks for an older one" in fault for fault in faults)
