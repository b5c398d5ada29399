#!/usr/bin/env python3
"""Builds the wheels that a release publishes, and tries each: `make wheels`.

A source distribution comes first. From it, without network, comes a wheel for each Python that is here, linked against
the glibc of the platform tag, whatever this machine's is. auditwheel confirms the tag. Each wheel is installed into an
empty environment and tried without torch, GPU and driver, and, where `--torch` can be installed, with the demo. Results
are in dist/.

With --built-torches the wheels hold the parts that link torch, built for these releases with this machine's own
compiler, since torch's libraries want its C++ library. Where the system is older than this one, they do not load, and
are compiled there as without.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from interpreters import find_interpreters

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "wheels"
DIST = ROOT / "dist"
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
GLIBC = "2.28"  # what torch's own wheels need
TRY_ALONE = """
import sys

import ebbtide
from ebbtide import _core

assert "torch" not in sys.modules
_core.use_driver("sim")
address = _core.alloc("weights", 8 << 20)
assert _core.pause(["weights"]).bytes == 8 << 20
assert _core.resume(["weights"]).bytes == 8 << 20
_core.free(address)
print(f"ebbtide {ebbtide.__version__} from {_core.loaded_library()}")
"""


class WheelError(Exception):
    """A step failed; the sentence names its log."""


def run(name: str, command: Sequence[object], **changes: str) -> str:
    """Runs a step, its output in a log of this name. Returns the output.

    Raises:
        WheelError: the command failed.
    """
    log = WORK / "logs" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    words = [str(word) for word in command]
    done = subprocess.run(
        words, cwd=WORK, env={**os.environ, **changes}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    output = done.stdout.decode(errors="replace")
    log.write_text(f"$ {' '.join(words)}\n{output}")
    if done.returncode != 0:
        raise WheelError(f"{name} failed with status {done.returncode}: see {log}\n" + output[-1500:])
    print(f"== {name}: {time.monotonic() - start:.0f} s", flush=True)
    return output


def make_environment(name: str, interpreter: Path, requirements: Sequence[object]) -> Path:
    """A fresh virtual environment with these requirements. Returns its Python."""
    folder = WORK / name
    shutil.rmtree(folder, ignore_errors=True)
    run(f"{name}-make", [interpreter, "-m", "venv", folder])
    python = folder / "bin" / "python"
    if requirements:
        run(f"{name}-install", [python, "-m", "pip", "install", "--disable-pip-version-check", *requirements])
    return python


def build_sdist(tools: Path) -> Path:
    """The source distribution, from the files of the checkout."""
    run("sdist", [tools, "-m", "build", "--sdist", "--no-isolation", "--outdir", DIST, ROOT])
    (sdist,) = DIST.glob("ebbtide-*.tar.gz")
    return sdist


def write_compilers(tools: Path) -> dict[str, str]:
    """CC and CXX that link against GLIBC."""
    target = f"{platform.machine()}-linux-gnu.{GLIBC}"
    chosen = {}
    for variable, mode in (("CC", "cc"), ("CXX", "c++")):
        script = WORK / f"compiler-{mode}"
        script.write_text(f'#!/bin/sh\nexec "{tools}" -m ziglang {mode} -target {target} "$@"\n')
        script.chmod(0o755)
        chosen[variable] = str(script)
    return chosen


def build_wheel(python: str, interpreter: Path, sdist: Path, tools: Path, compilers: dict[str, str]) -> Path:
    """A wheel for one Python, from the source distribution, with nothing downloaded while it is built."""
    builder = make_environment(f"build-{python}", interpreter, ["-r", ROOT / "requirements" / "build.txt"])
    raw = WORK / f"raw-{python}"
    shutil.rmtree(raw, ignore_errors=True)
    offline = ["--no-index", "--no-build-isolation", "--no-deps", "--config-settings=cmake.define.EBBTIDE_OFFLINE=ON"]
    path = f"{builder.parent}{os.pathsep}{os.environ['PATH']}"
    run(f"wheel-{python}", [builder, "-m", "pip", "wheel", *offline, "-w", raw, sdist], PATH=path, **compilers)
    (wheel,) = raw.glob("*.whl")
    tag = f"manylinux_{GLIBC.replace('.', '_')}_{platform.machine()}"
    path = f"{tools.parent}{os.pathsep}{os.environ['PATH']}"
    repair = [tools, "-m", "auditwheel", "repair", "--plat", tag, "--only-plat", "-w", DIST, wheel]
    run(f"auditwheel-{python}", repair, PATH=path)
    abi = "cp" + python.replace(".", "")
    (published,) = DIST.glob(f"ebbtide-*-{abi}-{abi}-{tag}.whl")
    return published


BUILD_PARTS = """
import sys
from pathlib import Path

from ebbtide.torch_extension import build

build.build_for_wheel(Path(sys.argv[1]))
"""
TRY_BUILT = """
import ebbtide
import torch
from ebbtide import saver

with ebbtide.lms.enable(limit="1GiB"), saver.region("weights"):
    assert torch.ones(1 << 20).sum() == 1 << 20
"""


def add_built_parts(
    python: str, interpreter: Path, wheel: Path, tools: Path, torches: Sequence[str], index: Sequence[str]
) -> None:
    """Builds what links torch, and puts it into the wheel."""
    unpacked = WORK / f"unpacked-{python}"
    shutil.rmtree(unpacked, ignore_errors=True)
    run(f"unpack-{python}", [tools, "-m", "wheel", "unpack", "-d", unpacked, wheel])
    (root,) = unpacked.iterdir()
    environments = []
    for version in torches:
        name = f"built-{python}-torch{version}"
        environments.append(make_environment(name, interpreter, [wheel, "numpy", f"torch=={version}", *index]))
        run(f"{name}-parts", [environments[-1], "-I", "-c", BUILD_PARTS, root / "ebbtide"], EBBTIDE_DRIVER="sim")
    run(f"pack-{python}", [tools, "-m", "wheel", "pack", "-d", wheel.parent, root])
    for environment in environments:
        name = environment.parents[1].name
        again = ["--force-reinstall", "--no-deps", "--no-index", wheel]
        run(f"{name}-install", [environment, "-m", "pip", "install", *again])
        nothing = {"CXX": "/nowhere", "EBBTIDE_CACHE_DIR": str(WORK / "nothing")}
        run(f"{name}-try", [environment, "-I", "-c", TRY_BUILT], EBBTIDE_DRIVER="sim", **nothing)


def try_wheel(python: str, interpreter: Path, wheel: Path, torch: Sequence[str]) -> str:
    """Installs a wheel apart and uses it. Returns a sentence on what was tried."""
    environment = make_environment(f"try-{python}", interpreter, [wheel])
    run(f"alone-{python}", [environment, "-I", "-c", TRY_ALONE], EBBTIDE_DRIVER="sim")
    run(f"command-{python}", [environment.with_name("ebbtide"), "--help"])
    if not torch:
        return "works without torch and without a driver"
    run(f"torch-{python}", [environment, "-m", "pip", "install", "--disable-pip-version-check", *torch])
    run(f"demo-{python}", [environment.with_name("ebbtide"), "demo"], EBBTIDE_DRIVER="sim")
    return "works without torch and without a driver; so does the demo with torch"


def read_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make wheels", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--pythons", default=",".join(PYTHONS), help="separated by commas; default: %(default)s")
    parser.add_argument("--torch", default="", help="what pip installs for the demo, such as torch==2.13.0")
    parser.add_argument("--torch-index", default="", help="the index of torch's CPU builds, where pip does not know it")
    parser.add_argument(
        "--torch-pythons", default=f"{sys.version_info[0]}.{sys.version_info[1]}", help="with which the demo is tried"
    )
    parser.add_argument("--built-torches", default="", help="releases of torch, separated by commas: 2.12.0,2.13.0")
    return parser.parse_args(words)


def main() -> int:
    given = read_arguments()
    interpreters = find_interpreters(PYTHONS)
    wanted = given.pythons.split(",")
    missing = [python for python in wanted if python not in interpreters]
    if missing:
        print(f"make wheels: no usable Python {', '.join(missing)} here (with venv and Python.h)", file=sys.stderr)
        return 2
    shutil.rmtree(DIST, ignore_errors=True)
    WORK.mkdir(parents=True, exist_ok=True)
    torch = [given.torch, *(["--extra-index-url", given.torch_index] if given.torch_index else [])]
    try:
        files = ["-r", ROOT / "requirements" / "build.txt", "-r", ROOT / "requirements" / "wheels.txt"]
        tools = make_environment("tools", Path(sys.executable), files)
        sdist = build_sdist(tools)
        compilers = write_compilers(tools)
        for python in wanted:
            wheel = build_wheel(python, interpreters[python], sdist, tools, compilers)
            if given.built_torches:
                releases = given.built_torches.split(",")
                add_built_parts(python, interpreters[python], wheel, tools, releases, torch[1:])
            with_torch = given.torch and python in given.torch_pythons.split(",")
            print(f"{wheel.name}: {try_wheel(python, interpreters[python], wheel, torch if with_torch else [])}")
    except WheelError as error:
        print(f"make wheels: {error}", file=sys.stderr)
        return 1
    print(f"{sdist.name} and {len(wanted)} wheels are in {DIST}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
