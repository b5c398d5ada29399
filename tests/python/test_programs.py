"""The file that a command names, and programs that the system would not preload."""

import os
import struct
import sys
from pathlib import Path

import ebbtide
import pytest
from ebbtide.launch import programs

LIBRARY = Path(ebbtide.__file__).resolve().with_name("libebbtide_preload.so")
MACHINE = struct.unpack_from("<H", LIBRARY.read_bytes(), 18)[0]


def write_program(path, *, interpreter=b"/lib64/ld-linux-x86-64.so.2\0", bits=64, machine=MACHINE):
    """Writes the header of an ELF file: enough to be examined, but not to be run."""
    header = b"\x7fELF" + bytes([2 if bits == 64 else 1, 1, 1]).ljust(12, b"\0") + struct.pack("<HHI", 3, machine, 1)
    count = 2 if interpreter else 1
    header += struct.pack("<QQQIHHHHHH", 0, 64, 0, 0, 64, 56, count, 0, 0, 0)
    load = struct.pack("<IIQQQQQQ", 1, 5, 0, 0, 0, 64, 64, 4096)
    named = struct.pack("<IIQQQQQQ", 3, 4, 64 + 2 * 56, 0, 0, len(interpreter), len(interpreter), 1)
    path.write_bytes(header + load + (named + interpreter if interpreter else b""))
    path.chmod(0o755)
    return path


def obstacle(path):
    return programs.preload_obstacle(path, LIBRARY)


def test_programs_of_this_system_are_preloaded(tmp_path):
    assert obstacle(Path(sys.executable)) == ""
    assert obstacle(Path("/bin/sh")) == ""
    assert obstacle(write_program(tmp_path / "program")) == ""


@pytest.mark.parametrize(
    ("features", "sentence"),
    [
        ({"interpreter": b""}, "is linked statically"),
        ({"interpreter": b"/lib/ld-musl-x86_64.so.1\0"}, "uses musl"),
        ({"bits": 32}, "is for another kind of machine"),
        ({"machine": MACHINE + 1}, "is for another kind of machine"),
    ],
)
def test_those_that_are_not_are_named(tmp_path, features, sentence):
    program = write_program(tmp_path / "program", **features)
    assert obstacle(program).startswith(f"{program} {sentence}")
    script = tmp_path / "script"
    script.write_text(f"#!  {program} -x\n")
    assert obstacle(script).startswith(f"{program} {sentence}")


def test_other_rights_are_told_by_owner_and_mode(tmp_path, monkeypatch):
    program = write_program(tmp_path / "program")
    for mode, function in ((0o4755, "geteuid"), (0o2755, "getegid")):
        program.chmod(mode)
        assert obstacle(program) == ""  # its owner and its rights are ours
        with monkeypatch.context() as other:
            other.setattr(os, function, lambda: 12345)
            assert "runs with other rights than yours" in obstacle(program)
    program.chmod(0o755)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert obstacle(program) == ""
    monkeypatch.setattr(os, "getxattr", lambda path, name: b"\1" if name == "security.capability" else b"")
    assert "runs with other rights than yours" in obstacle(program)


@pytest.mark.parametrize("content", [b"", b"#!", b"#! \n", b"#!/missing\n", b"text", b"\x7fELF"])
def test_a_file_that_is_no_program_is_no_obstacle(tmp_path, content):
    path = tmp_path / "file"
    path.write_bytes(content)
    assert obstacle(path) == obstacle(tmp_path / "missing") == ""


def test_a_garbled_program_is_no_error(tmp_path):
    whole = write_program(tmp_path / "program").read_bytes()
    path = tmp_path / "garbled"
    for position in range(len(whole)):
        path.write_bytes(whole[:position])
        assert isinstance(obstacle(path), str)
        path.write_bytes(whole[:position] + b"\xff" * 8 + whole[position + 8 :])
        assert isinstance(obstacle(path), str)


def test_the_first_executable_on_path_is_found(tmp_path):
    for folder, mode in (("a", 0o644), ("b", 0o755), ("c", 0o755)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "tool").touch(mode)
    path = {"PATH": os.pathsep.join(str(tmp_path / folder) for folder in "abc")}
    assert programs.find_program("tool", path) == tmp_path / "b" / "tool"
    assert programs.find_program(str(tmp_path / "c" / "tool"), path) == tmp_path / "c" / "tool"
    with pytest.raises(PermissionError, match="tool is not executable"):
        programs.find_program("tool", {"PATH": str(tmp_path / "a")})
    with pytest.raises(FileNotFoundError, match="'tool'"):
        programs.find_program("tool", {"PATH": str(tmp_path)})
    assert programs.find_program("sh", {}).name == "sh"  # without PATH, the system's default path is searched
