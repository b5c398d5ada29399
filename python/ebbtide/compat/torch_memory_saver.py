"""ebbtide's torch_memory_saver in a program that was not started by `ebbtide run --compat tms`.

    import ebbtide.compat.torch_memory_saver

    ebbtide.compat.torch_memory_saver.install()
    from torch_memory_saver import torch_memory_saver

docs/migrate/torch_memory_saver.md has the other ways.
"""

import importlib
import logging
import os
import sys
from types import ModuleType
from typing import Any

from ebbtide import settings
from ebbtide.errors import StateError
from ebbtide.launch import preloading

NAME = "torch_memory_saver"
_SGLANG_ADAPTER = "sglang.srt.utils.torch_memory_saver_adapter"
_SGLANG_CHOICE = "SGLANG_PLUGINS"

_logger = logging.getLogger(__name__)


def install() -> ModuleType:
    """From now on `import torch_memory_saver` gives ebbtide's, in this process and in those that multiprocessing spawns
    from it. Called again, it does nothing. A module that has imported another one keeps that.

    Returns:
        The module.

    Raises:
        StateError: another torch_memory_saver was used already.
    """
    there = sys.modules.get(NAME)
    if there is not None and not is_ours(there):
        if getattr(getattr(there, NAME, None), "_impl", None) is not None:
            raise StateError(
                f"the torch_memory_saver of {there.__file__} holds memory already: install ebbtide's before the "
                "program uses it"
            )
        for name in [name for name in sys.modules if name.partition(".")[0] == NAME]:
            del sys.modules[name]
    folder = str(preloading.compat_path())
    sys.path[:] = [folder, *(entry for entry in sys.path if entry != folder)]
    importlib.invalidate_caches()
    return importlib.import_module("torch_memory_saver")


def saver_tag(tag: str) -> str:
    """The tag of `ebbtide.saver` for one of torch_memory_saver's, which is any text.

        saver.survivors(saver_tag("weights/0"))  # the tag 'weights%2F0'

    Raises:
        TypeError: no text.
    """
    from ebbtide import _core

    if not isinstance(tag, str):
        raise TypeError(f"a tag is a str, not {type(tag).__name__}")
    return _core.encode_tag(tag.encode())


def is_ours(module: ModuleType) -> bool:
    """Whether this torch_memory_saver is ebbtide's."""
    return (module.__file__ or "").startswith(f"{preloading.compat_path()}{os.sep}")


def plug_into_sglang() -> None:
    """SGLang's entry point: installs the module where the user asks for it, by EBBTIDE_COMPAT=tms or by naming ebbtide
    in SGLANG_PLUGINS. Otherwise SGLang stays as it is."""
    chosen = [name.strip() for name in os.environ.get(_SGLANG_CHOICE, "").split(",")]
    if "ebbtide" not in chosen and settings.read("compat", os.environ) != "tms":
        _logger.info("ebbtide is not used: set EBBTIDE_COMPAT=tms, or name ebbtide in %s", _SGLANG_CHOICE)
        return
    module = install()
    adapter: Any = sys.modules.get(_SGLANG_ADAPTER)
    if adapter is not None:  # it has imported the other one, or failed to
        adapter.torch_memory_saver, adapter._memory_saver, adapter.import_error = module, getattr(module, NAME), None
