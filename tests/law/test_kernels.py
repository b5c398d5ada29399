"""csrc/kernels/blocks.ptx is compiled from the sources, and every driver that ebbtide serves can read it."""

import importlib.util
import re
import shutil
from pathlib import Path
from types import ModuleType

import pytest

NEWEST_PTX = (8, 0)  # CUDA 12.0's
OLDEST_TARGET = 60
# Each entry and the PTX types of its parameters, as csrc/kernels/blocks.h promises them.
ENTRIES = {
    "ebbtide_digest_blocks": ["u64", "u64", "u64", "u64", "u32"],
    "ebbtide_fill_blocks": ["u64", "u32"],
    "ebbtide_deliver": ["u64", "u64", "u64", "u64", "u32", "u32"],
}


@pytest.fixture(scope="module")
def make_ptx(root: Path) -> ModuleType:
    """tools/make_ptx.py as a module."""
    spec = importlib.util.spec_from_file_location("make_ptx", root / "tools" / "make_ptx.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read_entries(ptx: str) -> dict[str, list[str]]:
    """Each kernel of a PTX text -> the types of its parameters."""
    found = re.findall(r"^\.visible \.entry (\w+)\(([^)]*)\)", ptx, re.MULTILINE)
    return {name: re.findall(r"\.param \.(\w+)", parameters) for name, parameters in found}


def find_faults(csrc: Path, make_ptx: ModuleType) -> list[str]:
    """The faults of the PTX below csrc."""
    ptx = (csrc / make_ptx.PTX).read_text()
    faults = []
    if f"// sources: {make_ptx.digest_sources(csrc)}\n" not in ptx:
        faults.append("a source has changed since: type `make ptx`")
    version = re.search(r"^\.version (\d+)\.(\d+)$", ptx, re.MULTILINE)
    if not version or (int(version[1]), int(version[2])) > NEWEST_PTX:
        faults.append("drivers of CUDA 12.0 can't read this PTX version")
    target = re.search(r"^\.target sm_(\d+)$", ptx, re.MULTILINE)
    if not target or int(target[1]) != OLDEST_TARGET:
        faults.append(f"the target is not sm_{OLDEST_TARGET}, which every later device takes")
    if ".address_size 64" not in ptx:
        faults.append("addresses are not 64 bits")
    if re.search(r"^(\.visible )?\.(global|const) ", ptx, re.MULTILINE):
        faults.append("a variable takes memory on every device")
    if read_entries(ptx) != ENTRIES:
        faults.append(f"the entries are {read_entries(ptx)}")
    return faults


def test_the_ptx_is_what_it_must_be(root: Path, make_ptx: ModuleType) -> None:
    assert find_faults(root / "csrc", make_ptx) == []


def test_every_header_of_the_kernels_counts_as_a_source(root: Path, make_ptx: ModuleType) -> None:
    assert set(make_ptx.read_sources(root / "csrc")) == {
        "kernels/blocks.cu",
        "kernels/block_types.h",
        "kernels/digest_steps.h",
    }


def test_the_compiler_is_that_of_the_oldest_driver(root: Path) -> None:
    lines = (root / "requirements/ptx.txt").read_text().splitlines()
    (version,) = [line.partition("==")[2] for line in lines if line.startswith("nvidia-cuda-nvrtc-cu12==")]
    assert version.startswith("12.0.")


def test_the_ptx_says_which_compiler_made_it(root: Path, make_ptx: ModuleType) -> None:
    assert "release 12.0" in (root / "csrc" / make_ptx.PTX).read_text()


def test_without_the_compiler_the_tool_says_what_to_do(make_ptx: ModuleType, monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["make_ptx.py", "--nvrtc", "/nowhere/libnvrtc.so.12"])
    assert make_ptx.main() == 1
    assert "libnvrtc.so.12" in capsys.readouterr().err
    monkeypatch.setattr(make_ptx.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="make ptx"):
        make_ptx.find_nvrtc()


# --- the checks above, seen to fail ---


@pytest.fixture
def planted(root: Path, tmp_path: Path, make_ptx: ModuleType) -> Path:
    """A copy of the kernels without a fault."""
    shutil.copytree(root / "csrc/kernels", tmp_path / "kernels")
    assert find_faults(tmp_path, make_ptx) == []
    return tmp_path


@pytest.mark.parametrize(
    ("file", "old", "new", "complaint"),
    [
        ("blocks.cu", "kLoads = 8", "kLoads = 4", "has changed"),
        ("digest_steps.h", "31", "33", "has changed"),
        ("block_types.h", "reserved", "unused", "has changed"),
        ("blocks.ptx", ".version 8.0", ".version 8.1", "PTX version"),
        ("blocks.ptx", ".target sm_60", ".target sm_90a", "target"),
        ("blocks.ptx", ".address_size 64", ".address_size 32", "64 bits"),
        ("blocks.ptx", ".address_size 64", ".address_size 64\n.global .align 8 .u64 made = 1;", "takes memory"),
        ("blocks.ptx", ".entry ebbtide_fill_blocks", ".entry ebbtide_fill", "entries"),
        ("blocks.ptx", ".param .u32 ebbtide_fill", ".param .u64 ebbtide_fill", "entries"),
    ],
)
def test_a_planted_fault_is_found(
    planted: Path, make_ptx: ModuleType, file: str, old: str, new: str, complaint: str
) -> None:
    path = planted / "kernels" / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    faults = find_faults(planted, make_ptx)
    assert len(faults) == 1
    assert complaint in faults[0]
