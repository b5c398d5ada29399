"""Finds the file of a command, and tells whether the system would load our libraries into it."""

import os
import shutil
import stat
import struct
from collections.abc import Mapping
from pathlib import Path

_ELF_MAGIC = b"\x7fELF"
_PT_INTERP = 3
_ISSUE = "LD_PRELOAD is ignored there"


def find_program(command: str, environment: Mapping[str, str]) -> Path:
    """The file that `command` would start.

    Raises:
        FileNotFoundError: there is none, nor can there be one of this name.
        PermissionError: there is one, but it can't be executed.
    """
    search = environment.get("PATH", os.defpath)
    found = shutil.which(command, path=search)
    if found is not None:
        return Path(found)
    folders = [""] if "/" in command else search.split(os.pathsep)
    for path in (Path(folder, command) for folder in folders if command):
        mode = _mode(path)
        if stat.S_ISDIR(mode) and "/" in command:
            raise PermissionError(f"{command} is a folder, not a program")
        if stat.S_ISREG(mode):
            raise PermissionError(f"{path} is not executable: chmod +x it, or start it with its interpreter")
    raise FileNotFoundError(f"there is no program {command!r}: is it misspelt, or not on PATH?")


def _mode(path: Path) -> int:
    """0 where there is no such file, nor can there be one: Path.is_file raises for a name that is too long."""
    try:
        return path.stat().st_mode
    except OSError:
        return 0


def preload_obstacle(program: Path, library: Path) -> str:
    """Why the system would not load `library` into `program`; "" if it would, or if that is unknown.

    For a script, its interpreter is examined.
    """
    try:
        program = _interpreter_of_script(program) or program
        header = _header(program)
        if not header.startswith(_ELF_MAGIC):
            return ""
        if _runs_with_other_rights(program):
            return f"{program} runs with other rights than yours (setuid, setgid or capabilities): {_ISSUE}"
        if _machine(header) != _machine(_header(library)):
            return f"{program} is for another kind of machine than {library.name}: {_ISSUE}"
        interpreter = _elf_interpreter(program)
    except (OSError, ValueError, OverflowError, struct.error):  # the latter three: a file that is cut off or garbled
        return ""
    if interpreter is None:
        return f"{program} is linked statically: {_ISSUE}"
    if b"musl" in interpreter:
        return f"{program} uses musl, and {library.name} needs glibc"
    return ""


def _interpreter_of_script(program: Path) -> Path | None:
    with program.open("rb") as file:
        is_script = file.read(2) == b"#!"
        words = file.readline(256).split() if is_script else []
    return Path(os.fsdecode(words[0])) if words else None


def _runs_with_other_rights(program: Path) -> bool:
    found = program.stat()
    if found.st_mode & stat.S_ISUID and found.st_uid != os.geteuid():
        return True
    if found.st_mode & stat.S_ISGID and found.st_gid != os.getegid():
        return True
    try:
        return os.geteuid() != 0 and bool(os.getxattr(program, "security.capability"))
    except OSError:  # none, or a file system without them
        return False


def _header(program: Path) -> bytes:
    with program.open("rb") as file:
        return file.read(64)


def _machine(header: bytes) -> tuple[int, int]:
    """ELF's class and machine."""
    return struct.unpack_from("<B", header, 4)[0], struct.unpack_from("<H", header, 18)[0]


def _elf_interpreter(program: Path) -> bytes | None:
    """The path in PT_INTERP, such as ld-linux's; None in a static program. Of 64 bits, as the library is."""
    with program.open("rb") as file:
        header = file.read(64)
        (table,) = struct.unpack_from("<Q", header, 32)
        entry_bytes, count = struct.unpack_from("<HH", header, 54)
        for number in range(count):
            file.seek(table + number * entry_bytes)
            kind, _, position, _, _, size = struct.unpack_from("<IIQQQQ", file.read(56))
            if kind == _PT_INTERP:
                file.seek(position)
                return file.read(min(size, 4096))
    return None
