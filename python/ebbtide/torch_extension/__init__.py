"""`_torch` (regions on the simulated device) and `_lms` (large model support), the parts of ebbtide that link torch:
compiled once for the torch, Python and ABI that are there, and kept, unless the wheel has them for these.

The cache is `$EBBTIDE_CACHE_DIR`, else `$XDG_CACHE_HOME/ebbtide`, else `~/.cache/ebbtide`. `$CXX` names the compiler
(default: c++, g++ or clang++, whichever is found first). Several processes that need it at once build it once.
"""

import contextlib
import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from ebbtide.errors import StateError
from ebbtide.locks import make_lock
from ebbtide.torch_extension.build import Recipe, build_once

__all__ = ["is_loaded", "load"]

_lock = make_lock()


def load(name: str = "_torch") -> ModuleType:
    """The module `_torch` or `_lms`, built at first need (then one line on stderr says so).

    Raises:
        StateError: there is no compiler, the build failed, or the library does not load; the message says what to
            install or where to look.
        ImportError: there is no torch.
    """
    full_name = f"ebbtide.{name}"
    module = sys.modules.get(full_name)
    if module is not None:
        return module
    with _lock:
        module = sys.modules.get(full_name)
        return module if module is not None else _load(name, full_name)


def is_loaded(name: str = "_torch") -> bool:
    """Whether `load(name)` has succeeded in this process."""
    return f"ebbtide.{name}" in sys.modules


def _load(name: str, full_name: str) -> ModuleType:
    # The recipe imports torch and the core: the extension binds to the libc10.so and the libebbtide.so that are in
    # the process by then.
    recipe = Recipe.of_this_process(name)
    built = recipe.folder_in_package() / f"{name}.so"
    module = None
    if built.is_file():
        with contextlib.suppress(ImportError):  # this system's C or C++ library is older than the wheel's builder's
            module = _open(built, full_name)
    if module is None:
        module = _open_own(build_once(recipe), full_name)
    sys.modules[full_name] = module
    return module


def _open(library: Path, full_name: str) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader(full_name, str(library))
    spec = importlib.util.spec_from_file_location(full_name, library, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _open_own(library: Path, full_name: str) -> ModuleType:
    try:
        return _open(library, full_name)
    except ImportError as error:
        raise StateError(
            f"ebbtide's torch extension {library} does not load ({error}). Delete {library.parent} to have it built "
            "anew; if that does not help, torch was replaced while this process ran, or its libraries are damaged."
        ) from error
