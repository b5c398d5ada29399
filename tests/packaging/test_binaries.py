"""The binaries need only libc and the loader, and export only what they promise."""

import re
import subprocess
from pathlib import Path

import pytest
from checks.binaries import Rule, find_faults, read_exports
from checks.names import (
    RESOLVERS,
    exported_driver_names,
    read_c_functions,
    read_driver_functions,
    read_hip_functions,
    read_hooks,
)
from checks.toolchain import find_cuda_include
from ebbtide.launch import preloading

# The C symbols of torch_memory_saver.
TMS = re.compile(r"^EBBTIDE_API [a-z0-9_* ]+ (tms_\w+|set_memory_margin_bytes)\(", re.MULTILINE)


@pytest.fixture(scope="session")
def package() -> Path:
    """The folder of the installed package."""
    import ebbtide

    assert ebbtide.__file__
    return Path(ebbtide.__file__).parent


@pytest.fixture(scope="session")
def rules(root: Path) -> dict[str, Rule]:
    """Each binary's pattern in the package -> its rule."""
    api = set().union(*(read_c_functions(header, "ebbtide_") for header in (root / "csrc/api").glob("ebbtide*.h")))
    tms = set().union(*(TMS.findall(path.read_text()) for path in (root / "csrc/compat").glob("*.cpp")))
    assert "set_memory_margin_bytes" in tms
    api |= tms
    control = read_c_functions(root / "csrc/sim/control.h", "ebbtide_sim_")
    listed = set(read_driver_functions(root / "csrc/driver/functions.def"))
    listed |= set(read_driver_functions(root / "csrc/sim/program_functions.def"))
    driver = set(exported_driver_names(listed, find_cuda_include()).values())
    # Programs ask for old names as well, so that the plain name may stand beside the versioned one.
    any_version = tuple(f"{name}{suffix}" for name in listed for suffix in ("", "_v2", "_v3", "_ptsz"))
    hooks = read_hooks(root / "csrc/preload/hooks.def") | {"dlsym"}
    driver |= {hip for hip, _ in read_hip_functions(root / "csrc/driver/functions.def").values()}
    creators = {"cuCtxCreate_v2", "cuCtxCreate_v3", "cuCtxCreate_v4"}
    driver |= creators | RESOLVERS
    simulator = (*any_version, *driver, *control)
    return {
        "libebbtide.so": Rule("libebbtide.so", may_export=tuple(api), must_export=frozenset(api)),
        # The same core under the same name: a process that preloads it has no other.
        "libebbtide_preload.so": Rule("libebbtide.so", tuple(api | hooks), must_export=frozenset(api | hooks)),
        "libebbtide_sim.so": Rule(
            "libebbtide_sim.so", (*simulator, "cuCtxCreate"), must_export=frozenset(driver | control)
        ),
        "_core.*.so": Rule(
            "", ("PyInit__core",), frozenset({"PyInit__core"}), frozenset({"libebbtide.so"}), runpath="$ORIGIN"
        ),
    }


@pytest.mark.parametrize("pattern", ["libebbtide.so", "libebbtide_preload.so", "libebbtide_sim.so", "_core.*.so"])
def test_binary_needs_and_exports_only_what_it_promises(package: Path, rules: dict[str, Rule], pattern: str) -> None:
    (binary,) = package.glob(pattern)
    assert find_faults(binary, rules[pattern]) == []


def test_no_other_binary_is_in_the_package(package: Path) -> None:
    names = sorted(path.name.split(".")[0] for path in package.glob("*.so"))
    assert names == ["_core", "libebbtide", "libebbtide_preload", "libebbtide_sim"]
    others = set(package.rglob("*.so*")) - {*package.glob("*.so")}
    assert others == {package / "compat" / "tms" / name for name in preloading.TMS_LIBRARY_NAMES}


def test_header_is_plain_c(root: Path, tmp_path: Path) -> None:
    """A C11 program with every warning on compiles against the header alone."""
    for compiler, standard, suffix in (("cc", "c11", "c"), ("c++", "c++17", "cpp")):
        source = tmp_path / f"use.{suffix}"
        headers = '#include "ebbtide_settings.h"\n#include "ebbtide.h"\n'
        source.write_text(headers + "int main(void) { return (int)ebbtide_api_version() * 0; }\n")
        command = [compiler, f"-std={standard}", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only"]
        subprocess.run([*command, f"-I{root / 'csrc/api'}", str(source)], check=True)


# --- the checker, seen to fail ---


def build(folder: Path, text: str, *options: str) -> Path:
    source = folder / "planted.c"
    source.write_text(text)
    library = folder / "libplanted.so"
    subprocess.run(
        ["cc", "-shared", "-fPIC", str(source), "-o", str(library), "-Wl,-soname,libplanted.so", *options], check=True
    )
    return library


GOOD = "int ebbtide_good(void) { return 0; }\n"
RULE = Rule("libplanted.so", ("ebbtide_*",), frozenset({"ebbtide_good"}))


@pytest.mark.parametrize(
    ("text", "options", "complaint"),
    [
        (GOOD + "int cuda_leak(void) { return 0; }\n", (), "exports cuda_leak"),
        ("int ebbtide_other(void) { return 0; }\n", (), "does not export ebbtide_good"),
        (GOOD, ("-Wl,--no-as-needed", "-lstdc++"), "needs libstdc++.so.6"),
        (GOOD, ("-Wl,-rpath,/somewhere",), "looks for libraries in"),
        (GOOD, ("-Wl,-soname,libother.so",), "has the SONAME"),
    ],
)
def test_a_planted_fault_is_found(tmp_path: Path, text: str, options: tuple[str, ...], complaint: str) -> None:
    library = build(tmp_path, text, *options)
    faults = find_faults(library, RULE)
    assert [complaint in fault for fault in faults] == [True], faults


def test_a_good_library_has_no_fault(tmp_path: Path) -> None:
    library = build(tmp_path, GOOD)
    assert find_faults(library, RULE) == []
    assert read_exports(library) == {"ebbtide_good"}


def test_a_symbol_version_is_a_fault(tmp_path: Path) -> None:
    """A named version node binds nothing of what programs import."""
    script = tmp_path / "planted.map"
    script.write_text("NODE_1 { global: ebbtide_*; local: *; };\n")
    library = build(tmp_path, GOOD, f"-Wl,--version-script={script}")
    assert any("NODE_1" in fault or "@@" in fault for fault in find_faults(library, RULE))


def test_every_symbol_of_torch_memory_saver_is_there(package: Path) -> None:
    """Those that its library exports for CUDA. Launchers also look for the name of one variable in the file."""
    flags = ("interesting_region", "enable_cpu_backup", "enable_disk_backup", "retain_cpu_backup")
    texts = ("current_tag", "cpu_backup_backend")
    symbols = {f"tms_{verb}_{name}" for name in (*flags, *texts) for verb in ("get", "set")}
    symbols |= {"tms_set_disk_backup_dir", "set_memory_margin_bytes", "tms_pause", "tms_resume"}
    symbols |= {"tms_get_cpu_backup_pointer", "tms_torch_malloc", "tms_torch_free"}
    for name in ("libebbtide.so", "libebbtide_preload.so"):
        exports = read_exports(package / name)
        assert {each for each in exports if each.startswith("tms_")} | {"set_memory_margin_bytes"} == symbols, name
        assert "set_memory_margin_bytes" in exports
        assert b"TMS_INIT_ENABLE_DISK_BACKUP" in (package / name).read_bytes()
