"""csrc/kernels/code_objects.s is compiled from the sources, and holds the kernels for each of AMD's architectures."""

import hashlib
import importlib
import re
import shutil
from pathlib import Path
from types import ModuleType

import pytest
from checks.code_objects import read_bundle, read_metadata, read_symbols

# The lanes of a wave on each architecture.
WAVES = {"gfx90a": 64, "gfx942": 64, "gfx950": 64, "gfx1100": 32}
# Each entry and the bytes of its parameters, as csrc/kernels/blocks.h promises them.
ENTRIES = {
    "ebbtide_digest_blocks": [8, 8, 8, 8, 4],
    "ebbtide_fill_blocks": [8, 4],
    "ebbtide_deliver": [8, 8, 8, 8, 4, 4],
}
THREADS = 512
# With more, fewer than two CTAs fit on a compute unit of gfx90a.
MOST_REGISTERS = 128
MOST_BYTES = 96 << 10
NAME = "hipv4-amdgcn-amd-amdhsa--"


@pytest.fixture
def tool(root: Path, monkeypatch) -> ModuleType:
    """tools/make_code_objects.py as a module."""
    monkeypatch.syspath_prepend(str(root / "tools"))
    return importlib.import_module("make_code_objects")


def find_kernel_faults(kernel: dict, wave: int) -> list[str]:
    arguments = [argument[".size"] for argument in kernel[".args"]]
    places = [argument[".offset"] for argument in kernel[".args"]]
    faults = []
    if arguments != ENTRIES[kernel[".name"]] or places != [sum(arguments[:index]) for index in range(len(arguments))]:
        faults.append(f"its parameters are {arguments} at {places}")
    if kernel[".kernarg_segment_size"] != sum(arguments):
        faults.append("it takes hidden parameters")
    if kernel[".wavefront_size"] != wave:
        faults.append(f"its waves have {kernel['.wavefront_size']} lanes")
    if kernel[".max_flat_workgroup_size"] != THREADS:
        faults.append(f"it is compiled for {kernel['.max_flat_workgroup_size']} threads")
    if kernel[".private_segment_fixed_size"] or kernel[".vgpr_count"] > MOST_REGISTERS:
        faults.append("it takes too many registers")
    return [f"{kernel['.name']}: {fault}" for fault in faults]


def find_faults(csrc: Path, tool: ModuleType) -> list[str]:
    """The faults of the code objects below csrc."""
    text = (csrc / tool.CODE_OBJECTS).read_text()
    bundle = tool.read_directives(text)
    faults = []
    if f"sources: {tool.digest_sources(csrc)}\n" not in text:
        faults.append("a source has changed since: type `make code-objects`")
    if f"bundle: {hashlib.sha256(bundle).hexdigest()}\n" not in text:
        faults.append("the directives have been edited")
        return faults
    if len(bundle) > MOST_BYTES:
        faults.append(f"the bundle has {len(bundle)} bytes")
    targets = {name.removeprefix(NAME): code for name, code in read_bundle(bundle).items() if name.startswith(NAME)}
    if set(targets) != set(WAVES):
        faults.append(f"the architectures are {sorted(targets)}")
    for target in targets.keys() & WAVES.keys():
        code = targets[target]
        metadata = read_metadata(code)
        kernels = {kernel[".name"]: kernel for kernel in metadata["amdhsa.kernels"]}
        assert metadata["amdhsa.target"] == f"amdgcn-amd-amdhsa--{target}"
        if set(kernels) != set(ENTRIES) or not read_symbols(code) >= {f"{name}.kd" for name in ENTRIES}:
            faults.append(f"the entries for {target} are {sorted(kernels)}")
        for kernel in kernels.values():
            faults += find_kernel_faults(kernel, WAVES[target])
    return faults


def test_the_code_objects_are_what_they_must_be(root: Path, tool: ModuleType) -> None:
    assert find_faults(root / "csrc", tool) == []


def test_the_shim_and_every_header_count_as_sources(root: Path, tool: ModuleType) -> None:
    assert set(tool.read_sources(root / "csrc", (tool.SOURCE, tool.SHIM))) == {
        "kernels/blocks.cu",
        "kernels/block_types.h",
        "kernels/digest_steps.h",
        "kernels/hip_shim.h",
    }


def test_the_simulated_device_is_one_of_them(root: Path) -> None:
    found = re.search(r'kArchitecture\[\] = "(\w+)"', (root / "csrc/sim/code_objects.h").read_text())
    assert found
    assert found[1] in WAVES


def test_without_the_compiler_the_tool_says_what_to_do(tool: ModuleType, monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["make_code_objects.py", "--zig", "/nowhere/zig"])
    assert tool.main() == 1
    assert "/nowhere/zig" in capsys.readouterr().err
    monkeypatch.setattr(tool.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="make code-objects"):
        tool.find_zig()


@pytest.mark.parametrize(
    "data", [b"", bytes(8), bytes(64), b"1234567", b"12345678" + bytes(80) + b"12", bytes(24) + b"1"]
)
def test_directives_give_back_the_bytes(tool: ModuleType, data: bytes) -> None:
    assert tool.read_directives(tool.write_directives(data)) == data.ljust((len(data) + 7) // 8 * 8, b"\0")


# --- the checks above, seen to fail ---


def test_a_write_back_without_a_wait_is_found(tool: ModuleType) -> None:
    tool.check_assembly("\tbuffer_wbl2 sc1\n\t;;#ASMSTART\n\ts_waitcnt vmcnt(0) ; and\n\tbuffer_inv sc1\n", "gfx942")
    with pytest.raises(RuntimeError, match="does not wait"):
        tool.check_assembly("\tbuffer_wbl2 sc1\n\tbuffer_inv sc1\n\ts_waitcnt vmcnt(0)\n", "gfx942")


@pytest.fixture
def planted(root: Path, tmp_path: Path, tool: ModuleType) -> Path:
    """A copy of the kernels without a fault."""
    shutil.copytree(root / "csrc/kernels", tmp_path / "kernels")
    assert find_faults(tmp_path, tool) == []
    return tmp_path


@pytest.mark.parametrize(
    ("file", "old", "new", "complaint"),
    [
        ("blocks.cu", "kLoads = 8", "kLoads = 4", "has changed"),
        ("hip_shim.h", "% 32", "% 64", "has changed"),
        ("code_objects.s", ".quad 0x5", ".quad 0x6", "edited"),
    ],
)
def test_a_change_is_found(planted: Path, tool: ModuleType, file: str, old: str, new: str, complaint: str) -> None:
    path = planted / "kernels" / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    (fault,) = find_faults(planted, tool)
    assert complaint in fault


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        (b"hipv4-amdgcn-amd-amdhsa--gfx90a", b"hipv4-amdgcn-amd-amdhsa--gfx908", "architectures"),
        (b"ebbtide_fill_blocks.kd\0", b"ebbtide_fill_block_.kd\0", "entries"),
        (b".kernarg_segment_size\x0c", b".kernarg_segment_size\x10", "hidden"),
        (b".wavefront_size\x20", b".wavefront_size\x40", "lanes"),
        (b".max_flat_workgroup_size\xcd\x02\x00", b".max_flat_workgroup_size\xcd\x04\x00", "threads"),
        (b".private_segment_fixed_size\x00", b".private_segment_fixed_size\x08", "registers"),
        (b".offset\x20\xa5.size\x04", b".offset\x20\xa5.size\x08", "parameters"),
    ],
)
def test_a_planted_fault_is_found(planted: Path, tool: ModuleType, old: bytes, new: bytes, complaint: str) -> None:
    path = planted / tool.CODE_OBJECTS
    text = path.read_text()
    bundle = tool.read_directives(text)
    assert old in bundle
    bundle = bundle.replace(old, new)
    header = re.sub(r"bundle: \w+", f"bundle: {hashlib.sha256(bundle).hexdigest()}", text[: text.index(".quad")])
    path.write_text(header + tool.write_directives(bundle))
    faults = find_faults(planted, tool)
    assert faults
    assert all(complaint in fault for fault in faults)
