"""`_torch`, the part of ebbtide that links torch: compiled once for the torch, Python and ABI that are there, and kept.

The cache is `$EBBTIDE_CACHE_DIR`, else `$XDG_CACHE_HOME/ebbtide`, else `~/.cache/ebbtide`. `$CXX` names the compiler
(default: c++, g++ or clang++, whichever is found first). Several processes that need it at once build it once.
"""

import importlib.machinery
import importlib.util
import sys
from types import ModuleType

from ebbtide.errors import StateError
from ebbtide.locks import make_lock
from ebbtide.torch_extension.build import Recipe, build_once

__all__ = ["load"]

_NAME = "ebbtide._torch"
_lock = make_lock()


def load() -> ModuleType:
    """The module `_torch`, built at first need (then one line on stderr says so).

    Raises:
        StateError: there is no compiler, the build failed, or what was built does not load; the message says what to
            install or where to look.
        ImportError: there is no torch.
    """
    module = sys.modules.get(_NAME)
    if module is not None:
        return module
    with _lock:
        module = sys.modules.get(_NAME)
        return module if module is not None else _load()


def _load() -> ModuleType:
    # The recipe imports torch and the core: the extension binds to the libc10.so and the libebbtide.so that are in
    # the process by then.
    library = build_once(Recipe.of_this_process())
    loader = importlib.machinery.ExtensionFileLoader(_NAME, str(library))
    spec = importlib.util.spec_from_file_location(_NAME, library, loader=loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise StateError(
            f"ebbtide's torch extension {library} does not load ({error}). Delete {library.parent} to have it built "
            "anew; if that does not help, torch was replaced while this process ran, or its libraries are damaged."
        ) from error
    sys.modules[_NAME] = module
    return module
