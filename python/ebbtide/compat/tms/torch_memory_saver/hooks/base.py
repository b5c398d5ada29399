"""What other packages build on: the base class of the ways in which torch's memory is hooked. ebbtide has one."""

from typing import Any, Literal

from ebbtide import _core

HookMode = Literal["preload", "torch"]


class HookUtilBase:
    """The library that serves a program."""

    @staticmethod
    def create(hook_mode: HookMode) -> "HookUtilBase":
        """The same for both modes."""
        return HookUtilBase()

    def get_path_binary(self) -> str:
        """The library's file."""
        return _core.loaded_library()

    def get_allocator(self) -> Any:
        """None: regions have pools of their own."""
        return None
