#!/usr/bin/env python3
"""Compiles csrc/kernels/blocks.cu into csrc/kernels/blocks.ptx with NVRTC, which needs no GPU and no toolkit.

NVRTC is that of CUDA 12.0, so that every driver from 12.0 on reads the result: the PyPI package nvidia-cuda-nvrtc-cu12
at the version of requirements/ptx.txt, found where this Python has it, or given by --nvrtc. `make ptx` does it all.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import importlib.util
import re
import sys
from pathlib import Path

CSRC = Path(__file__).resolve().parents[1] / "csrc"
SOURCE = "kernels/blocks.cu"
PTX = "kernels/blocks.ptx"
# The oldest that the kernels can be asked to run on: later ones take the same PTX.
OPTIONS = ("--gpu-architecture=compute_60", "--std=c++20", "--device-as-default-execution-space")
HEADER = """\
// Made from csrc/{source} by tools/make_ptx.py: don't edit, type `make ptx`.
// sources: {digest}
"""
INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)
CONSTANT = re.compile(r"^\.global \.align \d+ \.\w+ (\w+)(?:\[\d+\])?(?: = .*)?;\n", re.MULTILINE)


def read_sources(csrc: Path = CSRC, first: tuple[str, ...] = (SOURCE,)) -> dict[str, str]:
    """The kernels' source and every header of ours that it includes: path below csrc -> text."""
    found: dict[str, str] = {}
    waiting = list(first)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = (csrc / name).read_text()
            waiting += INCLUDE.findall(found[name])
    return dict(sorted(found.items()))


def digest_sources(csrc: Path = CSRC) -> str:
    """What blocks.ptx says that it was made from: sources and options, so that it can be seen to be stale."""
    parts = [*OPTIONS, *(part for source in read_sources(csrc).items() for part in source)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def find_nvrtc() -> Path:
    """libnvrtc.so of the package nvidia-cuda-nvrtc-cu12 in this Python. Raises FileNotFoundError with what to do."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for library in sorted(Path(folder).glob("cuda_nvrtc/lib/libnvrtc.so*")):
            return library
    raise FileNotFoundError("there is no NVRTC here: type `make ptx`, or install requirements/ptx.txt")


def drop_unused_constants(ptx: str) -> str:
    """Without what the headers' constants, NVRTC's own among them, leave behind: they stand in the code as numbers."""
    return CONSTANT.sub(lambda match: match[0] if ptx.count(match[1]) > 1 else "", ptx)


class Compiler:
    """NVRTC through ctypes."""

    def __init__(self, library: Path) -> None:
        # NVRTC opens its built-in headers by name: they are found where they are loaded already.
        for builtins in sorted(library.parent.glob("libnvrtc-builtins.so*")):
            ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
        self._library = ctypes.CDLL(str(library))
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p

    def compile(self, sources: dict[str, str]) -> str:
        """PTX of SOURCE. Raises RuntimeError with the compiler's log."""
        headers = {name: text for name, text in sources.items() if name != SOURCE}
        program = ctypes.c_void_p()
        self._check(
            self._library.nvrtcCreateProgram(
                ctypes.byref(program),
                sources[SOURCE].encode(),
                SOURCE.encode(),
                len(headers),
                _strings(headers.values()),
                _strings(headers),
            )
        )
        status = self._library.nvrtcCompileProgram(program, len(OPTIONS), _strings(OPTIONS))
        if status != 0:
            raise RuntimeError(self._text(program, "nvrtcGetProgramLog"))
        return drop_unused_constants(self._text(program, "nvrtcGetPTX"))

    def _text(self, program: ctypes.c_void_p, function: str) -> str:
        size = ctypes.c_size_t()
        self._check(getattr(self._library, f"{function}Size")(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._library, function)(program, buffer))
        return buffer.value.decode()

    def _check(self, status: int) -> None:
        if status != 0:
            raise RuntimeError(f"NVRTC: {self._library.nvrtcGetErrorString(status).decode()}")


def _strings(texts: object) -> ctypes.Array[ctypes.c_char_p]:
    encoded = [text.encode() for text in texts]  # type: ignore[attr-defined]
    return (ctypes.c_char_p * len(encoded))(*encoded)


def write_or_check(target: Path, text: str, command: str, is_check: bool) -> int:
    """The exit status, after the file was written, or compared with what it would be."""
    if is_check:
        is_same = target.is_file() and target.read_text() == text
        print(f"{target.name} is {'up to date' if is_same else f'stale: type `{command}`'}")
        return 0 if is_same else 1
    target.write_text(text)
    print(f"wrote {target}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nvrtc", type=Path, help="libnvrtc.so.12 of CUDA 12.0; default: this Python's package")
    parser.add_argument("--check", action="store_true", help="write nothing; fail where blocks.ptx would change")
    arguments = parser.parse_args()
    try:
        compiler = Compiler(arguments.nvrtc or find_nvrtc())
        ptx = HEADER.format(source=SOURCE, digest=digest_sources()) + compiler.compile(read_sources())
    except (OSError, RuntimeError) as error:
        print(f"make_ptx: {error}", file=sys.stderr)
        return 1
    return write_or_check(CSRC / PTX, ptx, "make ptx", arguments.check)


if __name__ == "__main__":
    sys.exit(main())
