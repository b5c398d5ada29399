"""For other packages: the base class of the ways in which torch's memory is hooked."""

from typing import Any, Literal

from ebbtide import _core

HookMode = Literal["preload", "torch"]


class HookUtilBase:
    """The library that serves a program."""

    @staticmethod
    def create(hook_mode: HookMode) -> "HookUtilBase":
        """The one of this mode. Regions work the same with both."""
        from torch_memory_saver.hooks.mode_preload import HookUtilModePreload
        from torch_memory_saver.hooks.mode_torch import HookUtilModeTorch

        return HookUtilModeTorch() if hook_mode == "torch" else HookUtilModePreload()

    def get_path_binary(self) -> str:
        """The library's file."""
        return _core.loaded_library()

    def get_allocator(self) -> Any:
        """None: regions have pools of their own."""
        return None
