#!/usr/bin/env python3
"""Compiles csrc/kernels/blocks.cu into csrc/kernels/code_objects.s with clang, which needs no AMD GPU and no ROCm.

The result is one of clang's offload bundles, which hipModuleLoadData takes: a code object for each of TARGETS. It is
checked in as data directives, so that the assembler of any build embeds it. clang is that of the PyPI package ziglang
at the version of requirements/code_objects.txt, because it is the same on every machine. `make code-objects` does it
all.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from make_ptx import CSRC, SOURCE, read_sources, write_or_check

SHIM = "kernels/hip_shim.h"
CODE_OBJECTS = "kernels/code_objects.s"
TARGETS = ("gfx90a", "gfx942", "gfx950", "gfx1100")
# Code objects of version 5 are loaded by ROCm 6.0 and later.
COMPILE = (
    *("-x", "hip", "--cuda-device-only", "-nogpulib", "-nogpuinc", "-nostdinc", "-nostdinc++", "-std=c++20", "-O3"),
    *("-mcode-object-version=5", "-fuse-cuid=none", "-fno-ident", "-Wall", "-Wextra", "-Werror"),
    *("-I", ".", "-include", SHIM, "-S"),
)
ASSEMBLE = ("-target", "amdgcn-amd-amdhsa", "-c")
LINK = ("-shared", "--no-undefined", "--discard-all")
HEADER = """\
/* Made from csrc/{source} by tools/make_code_objects.py: don't edit, type `make code-objects`.
   sources: {sources}
   bundle: {bundle}
   compiler: {compiler} */
"""
MAGIC = b"__CLANG_OFFLOAD_BUNDLE__"
# Clang's bundler aligns so: the code objects can be mapped from the library's file.
ALIGNMENT = 4096
WORD_BYTES = 8
WORDS_PER_LINE = 6
# Fewer zeros are written out.
LEAST_ZEROS = 4


def digest_sources(csrc: Path = CSRC) -> str:
    """What code_objects.s says that it was made from: sources and options, so that it can be seen to be stale."""
    sources = read_sources(csrc, (SOURCE, SHIM))
    parts = [*TARGETS, *COMPILE, *ASSEMBLE, *LINK, *(part for source in sources.items() for part in source)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def make_bundle(code_objects: dict[str, bytes]) -> bytes:
    """Clang's offload bundle of these: an empty entry for the host, then one for each target."""
    entries = {"host-x86_64-unknown-linux-gnu-": b""}
    entries |= {f"hipv4-amdgcn-amd-amdhsa--{target}": code for target, code in code_objects.items()}
    offset = ALIGNMENT
    table = MAGIC + struct.pack("<Q", len(entries))
    body = b""
    for name, code in entries.items():
        body += bytes(-len(body) % ALIGNMENT)
        table += struct.pack("<QQQ", offset + len(body), len(code), len(name)) + name.encode()
        body += code
    return table.ljust(offset, b"\0") + body


def write_directives(data: bytes) -> str:
    """Data directives that assemble to these bytes, and zeros up to a whole word."""
    data += bytes(-len(data) % WORD_BYTES)
    words = struct.unpack(f"<{len(data) // WORD_BYTES}Q", data)
    lines: list[str] = []
    waiting: list[int] = []

    def flush() -> None:
        for begin in range(0, len(waiting), WORDS_PER_LINE):
            lines.append(".quad " + ",".join(f"{word:#x}" for word in waiting[begin : begin + WORDS_PER_LINE]))
        waiting.clear()

    index = 0
    while index < len(words):
        end = index
        while end < len(words) and words[end] == 0:
            end += 1
        if end - index >= LEAST_ZEROS:
            flush()
            lines.append(f".zero {(end - index) * WORD_BYTES}")
            index = end
        else:
            waiting.append(words[index])
            index += 1
    flush()
    return "\n".join(lines) + "\n"


def read_directives(text: str) -> bytes:
    """What write_directives was given, from its text or a file with that."""
    data = bytearray()
    for directive, values in re.findall(r"^\.(quad|zero) (\S+)$", text, re.MULTILINE):
        numbers = [int(value, 0) for value in values.split(",")]
        data += struct.pack(f"<{len(numbers)}Q", *numbers) if directive == "quad" else bytes(numbers[0])
    return bytes(data)


def check_assembly(assembly: str, target: str) -> None:
    """Raises RuntimeError if a cache is written back without a wait for the end of that, as a release needs."""
    instructions = [line.split(";")[0].strip() for line in assembly.splitlines()]
    instructions = [line for line in instructions if line]
    for line, following in pairwise(instructions):
        if line.startswith("buffer_wbl2") and not following.startswith("s_waitcnt vmcnt(0)"):
            raise RuntimeError(f"{target}: {line} is followed by {following}, which does not wait for it")


def find_zig() -> Path:
    """The program of the package ziglang in this Python. Raises FileNotFoundError with what to do."""
    spec = importlib.util.find_spec("ziglang")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        return Path(folder) / "zig"
    raise FileNotFoundError(
        "there is no ziglang here: type `make code-objects`, or install requirements/code_objects.txt"
    )


class Compiler:
    """The clang and the lld inside of zig."""

    def __init__(self, zig: Path) -> None:
        self._zig = zig

    def compile(self, target: str, folder: Path) -> bytes:
        """The code object of SOURCE. Raises RuntimeError with the compiler's messages."""
        assembly, relocatable, linked = (folder / f"{target}{suffix}" for suffix in (".s", ".o", ".co"))
        self._run("clang", f"--offload-arch={target}", *COMPILE, "-o", str(assembly), SOURCE)
        check_assembly(assembly.read_text(), target)
        self._run("clang", f"-mcpu={target}", *ASSEMBLE, "-o", str(relocatable), str(assembly))
        self._run("ld.lld", *LINK, "-o", str(linked), str(relocatable))
        return linked.read_bytes()

    def version(self) -> str:
        return self._run("clang", "--version").splitlines()[0]

    def _run(self, *command: str) -> str:
        made = subprocess.run([str(self._zig), *command], cwd=CSRC, capture_output=True, text=True, check=False)
        if made.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} failed:\n{made.stderr}")
        return made.stdout


def make_text(compiler: Compiler, targets: Sequence[str] = TARGETS) -> str:
    """code_objects.s, whole."""
    with tempfile.TemporaryDirectory() as folder:
        bundle = make_bundle({target: compiler.compile(target, Path(folder)) for target in targets})
    directives = write_directives(bundle)
    digest = hashlib.sha256(read_directives(directives)).hexdigest()
    header = HEADER.format(source=SOURCE, sources=digest_sources(), bundle=digest, compiler=compiler.version())
    return header + directives


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--zig", type=Path, help="the program zig of ziglang; default: this Python's package")
    parser.add_argument("--check", action="store_true", help="write nothing; fail where code_objects.s would change")
    arguments = parser.parse_args()
    try:
        text = make_text(Compiler(arguments.zig or find_zig()))
    except (OSError, RuntimeError) as error:
        print(f"make_code_objects: {error}", file=sys.stderr)
        return 1
    return write_or_check(CSRC / CODE_OBJECTS, text, "make code-objects", arguments.check)


if __name__ == "__main__":
    sys.exit(main())
