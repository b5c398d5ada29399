"""What the package holds: every module, the binaries, the header, the sources of `_torch`, and nothing else."""

from collections.abc import Iterable
from importlib import metadata
from pathlib import Path, PurePosixPath

import pytest

# The last three are the preload library once more, for launchers of torch_memory_saver.
BINARIES = (
    *("libebbtide.so", "libebbtide_preload.so", "libebbtide_sim.so", "_core."),
    *(f"compat/tms/torch_memory_saver_hook_mode_preload{cuda}.abi3.so" for cuda in ("", "_cu12", "_cu13")),
)


def expected_files(root: Path) -> set[str]:
    """Paths inside the package that must be there, apart from the binaries."""
    python = root / "python" / "ebbtide"
    modules = {p.relative_to(python).as_posix() for p in python.rglob("*") if p.is_file() and p.suffix != ".pyc"}
    extension = {
        f"torch_extension/{path.relative_to(root).as_posix()}"
        for folder in ("csrc/torch/cpu", "csrc/torch/lms", "csrc/policy/lms")
        for path in (root / folder).iterdir()
        if path.suffix in (".cpp", ".h")
    }
    public = {path.name for path in (root / "csrc/api").glob("ebbtide*.h")}
    named = {"ahead", "causes", "lms", "queries", "settings", "share", "threads"}
    assert {"ebbtide.h", *(f"ebbtide_{name}.h" for name in named)} == public
    headers = {f"include/{name}" for name in public}
    headers |= {f"torch_extension/csrc/api/{name}" for name in public - {"ebbtide_settings.h"}}
    for_c = {"cmake/ebbtide-config.cmake", "cmake/ebbtide-config-version.cmake", "pkgconfig/ebbtide.pc"}
    return modules | extension | headers | for_c | {"py.typed", "_core.pyi"}


def find_faults(files: Iterable[str], expected: set[str]) -> list[str]:
    """Sentences about what is missing from, or too much in, an installed distribution's files."""
    files = {file for file in files if "__pycache__" not in file and not file.startswith("..")}
    inside = {file.removeprefix("ebbtide/") for file in files if file.startswith("ebbtide/")}
    elsewhere = {file for file in files if not file.startswith("ebbtide/") and ".dist-info/" not in file}
    binaries = {file for file in inside if file.startswith(BINARIES) and file.endswith(".so")}
    faults = [f"missing: {file}" for file in sorted(expected - inside)]
    faults += [f"not wanted: {file}" for file in sorted(inside - expected - binaries)]
    faults += [f"outside the package: {file}" for file in sorted(elsewhere) if PurePosixPath(file).parts[0] != "bin"]
    if len(binaries) != len(BINARIES):
        faults.append(f"binaries: {sorted(binaries)}")
    if not any(file.endswith("licenses/LICENSE") for file in files):
        faults.append("missing: the licence")
    return faults


def test_installed_files_are_what_they_should_be(root: Path) -> None:
    files = metadata.files("ebbtide")
    assert files
    assert find_faults([file.as_posix() for file in files], expected_files(root)) == []


def test_the_package_says_whose_it_is_and_on_which_terms() -> None:
    described = metadata.metadata("ebbtide")
    assert described["Author"] == "The ebbtide authors"
    assert described["License"] == "Apache-2.0"  # the field that every `pip show` prints


def test_the_package_says_where_it_is_found() -> None:
    addresses = dict(entry.split(", ") for entry in metadata.metadata("ebbtide").get_all("Project-URL") or ())
    assert addresses.keys() == {"Homepage", "Documentation", "Source"}
    assert all(address.startswith("https://") for address in addresses.values())


def test_the_command_is_installed() -> None:
    (entry,) = metadata.entry_points(group="console_scripts", name="ebbtide")
    assert entry.value == "ebbtide.cli:main"
    assert callable(entry.load())


# --- the checker, seen to fail ---

GOOD = {
    "ebbtide/__init__.py",
    "ebbtide/libebbtide.so",
    "ebbtide/libebbtide_preload.so",
    "ebbtide/libebbtide_sim.so",
    "ebbtide/_core.cpython-312-x86_64-linux-gnu.so",
    *(f"ebbtide/{name}" for name in BINARIES if name.startswith("compat/")),
    "ebbtide-0.1.0.dist-info/RECORD",
    "ebbtide-0.1.0.dist-info/licenses/LICENSE",
    "../../../bin/ebbtide",
}


@pytest.mark.parametrize(
    ("missing", "extra", "complaint"),
    [
        ("ebbtide/__init__.py", None, "missing: __init__.py"),
        (None, "ebbtide/tests/x.py", "not wanted: tests/x.py"),
        (None, "tests/x.py", "outside the package"),
        ("ebbtide/libebbtide_sim.so", None, "binaries"),
        ("ebbtide/compat/tms/torch_memory_saver_hook_mode_preload_cu12.abi3.so", None, "binaries"),
        ("ebbtide-0.1.0.dist-info/licenses/LICENSE", None, "the licence"),
        (None, "ebbtide/libcudart.so.13", "not wanted: libcudart.so.13"),
    ],
)
def test_a_planted_fault_is_found(missing: str | None, extra: str | None, complaint: str) -> None:
    assert find_faults(GOOD, {"__init__.py"}) == []
    faults = find_faults((GOOD - {missing}) | ({extra} if extra else set()), {"__init__.py"})
    assert [complaint in fault for fault in faults] == [True], faults
