"""Large model support: a training step that needs more device memory than there is.

    import ebbtide.lms

    ebbtide.lms.enable(limit="16GiB")       # or: with ebbtide.lms.enable(limit="16GiB"): ...

What autograd saves for backward leaves the device when memory is short, and comes back when backward wants it. Where
that is not enough, optimizer states, gradients and weights leave, too.
docs/lms.md says how it decides, and what it can't see. It needs torch 2.11 or newer.

`enabled`, `limit` (bytes, or "auto") and `min_size` (bytes) can be read, and set while it runs:
`ebbtide.lms.limit = "12GiB"`.
"""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from ebbtide.lms import control
from ebbtide.lms.calls import save_plan
from ebbtide.lms.control import disable, enable
from ebbtide.lms.report import plot, report, stats
from ebbtide.lms.streaming.backward_steps import step_in_backward

if TYPE_CHECKING:  # attributes of _Module; a size may be set as text, and is read in bytes
    enabled: bool
    limit: Any
    min_size: Any

__all__ = ["disable", "enable", "plot", "report", "save_plan", "stats", "step_in_backward"]


class _Module(ModuleType):
    """This module, with attributes that can be set."""

    def __setattr__(self, name: str, value: Any) -> None:
        is_known = name.startswith("_") or name in self.__dict__ or hasattr(type(self), name)
        if not is_known and not isinstance(value, ModuleType):  # importing a submodule sets it
            raise AttributeError(f"ebbtide.lms has no setting {name!r}: enabled, limit and min_size can be set")
        super().__setattr__(name, value)

    @property
    def enabled(self) -> bool:
        return control.is_enabled()

    @enabled.setter
    def enabled(self, value: bool) -> None:
        if not isinstance(value, bool):
            raise TypeError(f"enabled must be True or False, not {value!r}")
        control.enable_again() if value else control.disable()

    @property
    def limit(self) -> int | Literal["auto"]:
        return control.limit()

    @limit.setter
    def limit(self, value: Any) -> None:
        control.set_limit(value)

    @property
    def min_size(self) -> int:
        return control.min_size()

    @min_size.setter
    def min_size(self, value: Any) -> None:
        control.set_min_size(value)


sys.modules[__name__].__class__ = _Module
