"""EBBTIDE_CHECK=1: a warning where a pause leaves the gradients or the states of a paused model on the device.

A pause of a tag takes the tensors that were made in its regions. Gradients and optimizer states are made later, by
`backward()` and by the first `step()`, and lie in ordinary memory if no region is open then. Those in another tag are
no mistake: they can be paused as well.

Optimizers are known from their first step after the first region on. `saver.outside` tells of all others: an optimizer
that has only loaded its states, one that is no `torch.optim.Optimizer`, gradients without an optimizer.
"""

import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ebbtide import _core
from ebbtide.saver.tensors import living
from ebbtide.saver.tensors.walk import TensorWalk
from ebbtide.saver.values.outside import sum_up

_PACKAGE = __name__.partition(".")[0]
_known: "dict[int, weakref.ref[torch.optim.Optimizer]]" = {}  # single operations on it need no lock
_warned: set[str] = set()
_handle: Any = None


def watch() -> None:
    """From now on, learns of each optimizer at its next step. Called again, it does nothing."""
    global _handle
    if _handle is None:
        _handle = register_optimizer_step_post_hook(_remember)


def _remember(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    known = _known.get(id(optimizer))
    if known is None or known() is not optimizer:
        _known[id(optimizer)] = weakref.ref(optimizer)


def _living() -> list[torch.optim.Optimizer]:
    found = []
    for key, known in list(_known.items()):
        optimizer = known()
        if optimizer is not None:
            found.append(optimizer)
        elif _known.get(key) is known:
            del _known[key]
    return found


def warn_of_outside(tags: Sequence[str]) -> None:
    """Warns, once for each of these tags (none: every tag), of gradients and states that lie in no tag although their
    parameters lie in this one."""
    left = set(tags) - _warned
    if tags and not left:
        return
    for optimizer in _living():
        for tag, by_kind in _outside(optimizer).items():
            if (tag in left or not tags) and tag not in _warned:
                _warned.add(tag)
                warnings.warn(_say(optimizer, tag, by_kind), RuntimeWarning, stacklevel=_depth_of_caller())


def _outside(optimizer: torch.optim.Optimizer) -> dict[str, Counter[str]]:
    """The bytes of gradients and states in no tag, by the tag of their parameters and by kind."""
    found: dict[str, Counter[str]] = {}
    seen: set[int] = set()
    states = dict(optimizer.state) if isinstance(optimizer.state, Mapping) else {}  # another library's may be none
    for group in list(optimizer.param_groups):
        for parameter in list(group["params"]):
            device_type = parameter.device.type
            home = next(filter(None, (_tag_at(address) for address, _ in _ranges(parameter, device_type))), None)
            if home is None:
                continue
            for kind, thing in (("gradient", living.gradient_of(parameter)), ("state", states.get(parameter))):
                for address, size_bytes in _ranges(thing, device_type):
                    if address not in seen and _tag_at(address) is None:
                        seen.add(address)
                        found.setdefault(home, Counter())[kind] += size_bytes
    return found


def _ranges(thing: Any, device_type: str) -> Iterator[tuple[int, int]]:
    """The storages of a parameter, of a gradient, or of the values of a state, on this type of device."""
    walk = TensorWalk("EBBTIDE_CHECK", with_gradients=False)
    for tensor in walk.walk([thing]):
        memory = living.device_range(tensor, device_type)
        if memory is not None:
            yield memory


def _tag_at(address: int) -> str | None:
    info = _core.find(address)
    return None if info is None else info.tag


def _say(optimizer: torch.optim.Optimizer, tag: str, by_kind: Counter[str]) -> str:
    backward = ' (and backward(), with threads="all")' if "gradient" in by_kind else ""
    return (
        f"the pause of {tag!r} leaves {sum_up(by_kind)} on the device: {type(optimizer).__name__} has its parameters "
        f"in this tag, but these were made outside of its region. Run optimizer.step(){backward} in "
        f"saver.region({tag!r}), or call saver.adopt(optimizer, tag={tag!r}) after the first step; "
        "saver.outside(model, optimizer) lists them"
    )


def _depth_of_caller() -> int:
    """The `stacklevel` that shows the line that asked for the pause."""
    frame, depth = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == _PACKAGE:
        frame, depth = frame.f_back, depth + 1
    return depth
