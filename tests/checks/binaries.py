"""A binary's needs and exports, read with readelf and nm, and its faults."""

import re
import subprocess
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

# libm, libdl and libpthread are part of libc's package; older glibc keeps them apart.
SYSTEM_LIBRARIES = frozenset(
    {
        "libc.so.6",
        "libm.so.6",
        "libdl.so.2",
        "libpthread.so.0",
        "librt.so.1",
        "ld-linux-x86-64.so.2",
        "ld-linux-aarch64.so.1",
    }
)


@dataclass(frozen=True)
class Rule:
    """A binary's allowed needs besides the system's libraries, and its allowed (patterns) and required exports."""

    soname: str
    may_export: tuple[str, ...]
    must_export: frozenset[str]
    may_need: frozenset[str] = frozenset()
    runpath: str = ""


def run_tool(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def read_dynamic(binary: Path) -> dict[str, list[str]]:
    """The entries of `readelf -d` that name something: NEEDED, SONAME, RPATH, RUNPATH."""
    entries: dict[str, list[str]] = {"NEEDED": [], "SONAME": [], "RPATH": [], "RUNPATH": []}
    for kind, value in re.findall(
        r"\((NEEDED|SONAME|RPATH|RUNPATH)\).*\[(.*)\]", run_tool("readelf", "-dW", str(binary))
    ):
        entries[kind].append(value)
    return entries


def read_exports(binary: Path) -> set[str]:
    """Every dynamic symbol that the binary defines, with its version if it has one."""
    return {
        line.split()[-1] for line in run_tool("nm", "-D", "--defined-only", str(binary)).splitlines() if line.strip()
    }


def find_faults(binary: Path, rule: Rule) -> list[str]:
    """Sentences; empty when the binary keeps the rule."""
    dynamic = read_dynamic(binary)
    exports = read_exports(binary)
    faults = []
    if extra := sorted(set(dynamic["NEEDED"]) - SYSTEM_LIBRARIES - rule.may_need):
        faults.append(f"{binary.name} needs {', '.join(extra)}")
    if dynamic["SONAME"] != ([rule.soname] if rule.soname else []):
        faults.append(f"{binary.name} has the SONAME {dynamic['SONAME']}, not {rule.soname or 'none'}")
    if (runpath := dynamic["RPATH"] + dynamic["RUNPATH"]) != ([rule.runpath] if rule.runpath else []):
        faults.append(f"{binary.name} looks for libraries in {runpath}, not {rule.runpath or 'nowhere of its own'}")
    if extra := sorted(name for name in exports if not any(fnmatchcase(name, pattern) for pattern in rule.may_export)):
        faults.append(f"{binary.name} exports {', '.join(extra[:10])}")
    if missing := sorted(rule.must_export - exports):
        faults.append(f"{binary.name} does not export {', '.join(missing[:10])}")
    return faults
