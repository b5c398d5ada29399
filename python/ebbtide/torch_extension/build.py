"""How `_torch` is compiled: a recipe of plain values, and a build that several processes may ask for at once."""

import errno
import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from ebbtide.errors import StateError
from ebbtide.stderr import say

MOST_COMPILERS = 8  # at once
COMPILER_BYTES = 1 << 30  # each takes this much at most
CACHE_VARIABLE = "EBBTIDE_CACHE_DIR"
BUILT = "built"  # the folder of a wheel
_TOOLS = "a C++20 compiler (g++ 10 or newer, or clang++ 12 or newer; on Debian and Ubuntu: apt install g++)"


class _Parts(NamedTuple):
    purpose: str
    folders: tuple[str, ...]
    libraries: tuple[str, ...]


_PARTS = {
    "_torch": _Parts("the simulated device", ("torch/cpu",), ("c10",)),
    "_lms": _Parts("large model support", ("torch/lms", "policy/lms"), ("c10", "torch_cpu", "torch_python")),
}


@dataclass(frozen=True)
class Recipe:
    """All inputs of the build.

    Attributes:
        source_root: the folder that holds torch/cpu/*.cpp and api/ebbtide*.h.
        torch_folder: torch's package folder (its include/ and lib/).
        torch_version, torch_revision: as torch gives them.
        uses_new_abi: _GLIBCXX_USE_CXX11_ABI of that torch; wheels of 2.6 were mostly built without.
        python_tag: "cpython-311-x86_64-linux-gnu".
        python_include: the folder of Python.h.
        ebbtide_version: ebbtide's.
        core_library: the libebbtide.so of this process, or the preload library that stands for it.
        module: "_torch" or "_lms".
    """

    source_root: Path
    torch_folder: Path
    torch_version: str
    torch_revision: str
    uses_new_abi: bool
    python_tag: str
    python_include: Path
    ebbtide_version: str
    core_library: Path
    module: str = "_torch"

    @classmethod
    def of_this_process(cls, module: str = "_torch") -> "Recipe":
        """The recipe for the torch, the Python and the core of this process."""
        import torch

        from ebbtide import _core

        return cls(
            source_root=find_sources(),
            # Not torch.utils.cpp_extension: it imports setuptools, which need not be there.
            torch_folder=Path(torch.__file__).resolve().parent,
            torch_version=str(torch.__version__),
            torch_revision=str(torch.version.git_version),
            uses_new_abi=bool(torch._C._GLIBCXX_USE_CXX11_ABI),
            python_tag=str(sysconfig.get_config_var("SOABI")),
            python_include=Path(sysconfig.get_path("include")),
            ebbtide_version=_core.__version__,
            core_library=Path(_core.loaded_library()),
            module=module,
        )

    def sources(self, ending: str = ".cpp") -> list[Path]:
        """The sources, or their headers (".h")."""
        folders = [self.source_root / folder for folder in _PARTS[self.module].folders]
        return [path for folder in folders for path in sorted(folder.glob(f"*{ending}"))]

    def folder(self) -> Path:
        """Where the built file is kept."""
        return cache_folder() / "torch_extension" / self.key()

    def folder_in_package(self) -> Path:
        """Where a wheel may have the file, built beforehand. torch's builds of one release, for whatever CUDA, take the
        same."""
        release = replace(self, torch_version=self.torch_version.partition("+")[0])
        return Path(__file__).resolve().parent / BUILT / release.key()

    def key(self) -> str:
        """The name of the cache folder: the versions that must agree, and a hash of them with the sources."""
        digest = hashlib.sha256(repr((self.torch_revision, self.uses_new_abi, compile_flags(self))).encode())
        headers = [*self.sources(".h"), *sorted((self.source_root / "api").glob("ebbtide*.h"))]
        for path in [*self.sources(), *headers]:
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
        abi = f"abi{int(self.uses_new_abi)}"
        names = ("torch", self.torch_version, self.python_tag, abi, "ebbtide", self.ebbtide_version)
        return "-".join((*names, digest.hexdigest()[:12]))


def find_sources() -> Path:
    """The folder of the sources inside the installed package.

    Raises:
        StateError: it is not there.
    """
    folder = Path(__file__).resolve().parent / "csrc"
    if not (folder / "torch" / "cpu" / "module.cpp").is_file():
        raise StateError(f"the sources of ebbtide's torch extension are missing, {folder}: install ebbtide again")
    return folder


def compile_flags(recipe: Recipe) -> list[str]:
    """-DNDEBUG: torch's headers assert otherwise what its library leaves out."""
    return [
        *("-std=c++20", "-O2", "-DNDEBUG", "-fPIC", "-pthread", "-fvisibility=hidden"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(recipe.uses_new_abi)}",
    ]


def compile_line(recipe: Recipe, compiler: list[str], source: Path, output: Path) -> list[str]:
    """The call that compiles one source."""
    return [
        *(*compiler, *compile_flags(recipe)),
        *("-I", str(recipe.source_root)),
        *("-isystem", str(recipe.torch_folder / "include"), "-isystem", str(recipe.python_include)),
        *("-c", str(source), "-o", str(output)),
    ]


def link_line(
    recipe: Recipe, compiler: list[str], objects: Sequence[Path], output: Path, is_for_wheel: bool = False
) -> list[str]:
    """The call that links. At load the SONAME finds the libebbtide.so that is in the process. One for a wheel finds
    torch's libraries in the process as well."""
    torch_libraries = recipe.torch_folder / "lib"
    core_folder = recipe.core_library.parent
    plain_core = core_folder / "libebbtide.so"
    return [
        *(*compiler, *compile_flags(recipe), *map(str, objects)),
        *("-shared", "-o", str(output), f"-L{torch_libraries}"),
        *(f"-l{name}" for name in _PARTS[recipe.module].libraries),
        *([f"-L{core_folder}", "-l:libebbtide.so"] if plain_core.exists() else [str(recipe.core_library)]),
        *(["-s"] if is_for_wheel else [f"-Wl,-rpath,{core_folder}", f"-Wl,-rpath,{torch_libraries}"]),
    ]


def cache_folder() -> Path:
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base and Path(base).is_absolute() else Path("~/.cache").expanduser()) / "ebbtide"


def find_compiler() -> list[str]:
    """$CXX with its arguments, or the first of c++, g++ and clang++.

    Raises:
        StateError: there is none.
    """
    named = shlex.split(os.environ.get("CXX", ""))
    for candidate in [named] if named else [["c++"], ["g++"], ["clang++"]]:
        found = shutil.which(candidate[0])
        if found:
            return [found, *candidate[1:]]
    what = f"CXX={shlex.join(named)} names no program" if named else "there is no c++, g++ or clang++ on PATH"
    raise StateError(
        f"ebbtide compiles its torch extension once for the torch that is there, and {what}: "
        f"install {_TOOLS}, or set CXX"
    )


def build_once(recipe: Recipe) -> Path:
    """The built library, from the cache or built now; at most one process builds, the others wait for it.

    Raises:
        StateError: no compiler, no Python.h, no writable cache, or the compiler failed.
    """
    library = recipe.folder() / f"{recipe.module}.so"
    if not library.is_file():
        compiler = prepare(recipe)
        with (library.parent / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # goes with the file, also when this process dies
            if not library.is_file():
                _build(recipe, library, compiler)
    return library


def build_for_wheel(package: Path) -> None:
    """Builds all parts for the torch and the Python of this process into an unpacked wheel (tools/wheels.py)."""
    for name in _PARTS:
        recipe = Recipe.of_this_process(name)
        library = package / "torch_extension" / BUILT / recipe.folder_in_package().name / f"{name}.so"
        library.parent.mkdir(parents=True, exist_ok=True)
        _build(recipe, library, find_compiler(), is_for_wheel=True)


def prepare(recipe: Recipe) -> list[str]:
    """Makes the folder of the built library in the cache, and finds the compiler, which it returns.

    Raises:
        StateError: no writable cache, no compiler, or no Python.h.
    """
    folder = recipe.folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise StateError(
            f"ebbtide keeps its torch extension in {folder.parent}, which can't be written ({error.strerror}): "
            f"set {CACHE_VARIABLE} to a folder that can"
        ) from error
    compiler = find_compiler()
    if not (recipe.python_include / "Python.h").is_file():
        python = f"python{sys.version_info.major}.{sys.version_info.minor}"
        raise StateError(
            f"ebbtide compiles its torch extension once, and Python.h is not in {recipe.python_include}: "
            f"install Python's development files (on Debian and Ubuntu: apt install {python}-dev)"
        )
    return compiler


def _build(recipe: Recipe, library: Path, compiler: list[str], is_for_wheel: bool = False) -> None:
    purpose = _PARTS[recipe.module].purpose
    say(f"building its torch extension for {purpose}, with torch {recipe.torch_version}, once (up to a minute)")
    for stale in library.parent.glob("build-*"):  # of a process that was killed: we hold the lock
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="build-", dir=library.parent) as scratch:
        batches = _batches(recipe, Path(scratch))
        objects = [batch.with_suffix(".o") for batch in batches]
        lines = [compile_line(recipe, compiler, *each) for each in zip(batches, objects, strict=True)]
        with ThreadPoolExecutor(len(batches)) as pool:
            try:
                for result in pool.map(_run, lines):
                    _check(recipe, result, library.parent / "build.log")
            finally:
                pool.shutdown(cancel_futures=True)
        output = Path(scratch) / library.name
        _check(recipe, _run(link_line(recipe, compiler, objects, output, is_for_wheel)), library.parent / "build.log")
        output.rename(library)


def _batches(recipe: Recipe, folder: Path) -> list[Path]:
    """Files that include the sources, one for each compiler that runs: torch's headers take most of the time."""
    sources = recipe.sources()
    count = compiler_count(recipe)
    batches = [folder / f"{number}.cpp" for number in range(count)]
    for number, batch in enumerate(batches):
        batch.write_text("".join(f'#include "{source}"\n' for source in sources[number::count]))
    return batches


def compiler_count(recipe: Recipe) -> int:
    """How many compilers run at once."""
    free_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    most = min(MOST_COMPILERS, len(recipe.sources()), len(os.sched_getaffinity(0)), free_bytes // COMPILER_BYTES)
    return max(1, most)


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )


def _check(recipe: Recipe, result: subprocess.CompletedProcess[str], log: Path) -> None:
    """Raises StateError where a compiler failed, and keeps its output."""
    if result.returncode == 0:
        return
    status = f"status {result.returncode}"
    log.write_text(f"{shlex.join(result.args)}\n\n{result.stdout}\n{status}\n")
    first = next((line.strip() for line in result.stdout.splitlines() if "error" in line.lower()), status)
    raise StateError(
        f"ebbtide's torch extension could not be built for torch {recipe.torch_version} with {result.args[0]}: "
        f"{first}. The whole output is in {log}. "
        f"It needs {_TOOLS} and torch's headers in {recipe.torch_folder / 'include'}; CXX chooses another compiler."
    )
