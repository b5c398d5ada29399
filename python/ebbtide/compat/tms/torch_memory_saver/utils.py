"""Where the preload library is, which torch this is, and changes of the environment for a while."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from ebbtide import _core
from ebbtide.driver_choice import installed_torch_kind


@lru_cache(maxsize=1)
def is_xpu() -> bool:
    """Whether torch has an Intel GPU here, which ebbtide cannot serve."""
    if installed_torch_kind() == "none":
        return False
    import torch

    return hasattr(torch, "xpu") and bool(torch.xpu.is_available())


def get_binary_path_from_package(stem: str) -> Path:
    """The file of the preload library under the name that launchers look for, or the library of this process.

    Args:
        stem: "torch_memory_saver_hook_mode_preload", or "torch_memory_saver_hook_mode_torch". The file serves
            all CUDA versions.

    Raises:
        RuntimeError: there is no such file beside this package.
    """
    if stem == "torch_memory_saver_hook_mode_torch":
        return Path(_core.loaded_library())
    path = Path(__file__).parents[1] / f"{stem}.abi3.so"
    if not path.is_file():
        raise RuntimeError(f"there is no {path.name} in {path.parent}: install ebbtide again")
    return path


@contextmanager
def change_env(key: str, value: str) -> Iterator[None]:
    """Sets a variable of this process's environment inside the block."""
    before = os.environ.get(key)
    os.environ[key] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = before
