"""Starts children with the preload library."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from ebbtide.launch import preloading

from torch_memory_saver.hooks.base import HookUtilBase
from torch_memory_saver.utils import change_env, get_binary_path_from_package


class HookUtilModePreload(HookUtilBase):
    """The preload library hooks torch's own pools, so there is no allocator."""


@contextmanager
def configure_subprocess() -> Iterator[None]:
    """Inside, children start with the preload library, and `import torch_memory_saver` gives them ebbtide's.

    Other preloaded libraries stay. Grandchildren inherit it. With HIP, the library does nothing.
    """
    library = str(get_binary_path_from_package("torch_memory_saver_hook_mode_preload"))
    modules = preloading.with_first(str(preloading.compat_path()), os.environ.get(preloading.MODULES_VARIABLE, ""))
    with ExitStack() as changes:
        changes.enter_context(change_env(preloading.MODULES_VARIABLE, modules))
        inherited = os.environ.get(preloading.LOADER_VARIABLE, "")
        changes.enter_context(change_env(preloading.LOADER_VARIABLE, preloading.preload_list(library, inherited)))
        for name, value in preloading.settle_driver(os.environ).items():
            changes.enter_context(change_env(name, value))
        yield
