"""A tag for each model and each optimizer that a framework offloads by hand.

What the functions for verl and OpenRLHF share. Their offload moves tensors to the CPU, and their load makes new ones on
the GPU. Here the tensors stay the tensors that they are, on the GPU and at their addresses; only their memory leaves.
"""

from itertools import count, filterfalse
from typing import Any
from weakref import WeakKeyDictionary, ref

from ebbtide import driver_choice, saver
from ebbtide.integrations.resting import adopt
from ebbtide.locks import make_lock
from ebbtide.saver.reclaim import torch_cache
from ebbtide.saver.values.arguments import BackupName

_lock = make_lock()
_numbers = count()
_names: "WeakKeyDictionary[Any, str]" = WeakKeyDictionary()
_owners: "dict[str, ref[Any]]" = {}  # by tag, until a dead owner's tag has been trimmed


def tag_of(owner: Any, kind: str) -> str:
    """The tag of one kind of memory of a model or an optimizer, the same at every call: "verl.3.model"."""
    with _lock:
        if owner not in _names:
            _names[owner] = str(next(_numbers))
        family, _, part = kind.partition(".")
        tag = f"{family}.{_names[owner]}.{part}"
        _owners[tag] = ref(owner)
        return tag


def offload(tag: str, *things: Any, backup: BackupName | None = "ram", empty_cache: bool = False) -> None:
    """Moves the tensors of `things` into the tag, unless they are there, and pauses it. A paused tag stays as it is."""
    if driver_choice.is_off():
        return
    _trim_tags_of_the_dead()
    if tag not in saver.tags() or not saver.is_paused(tag):
        adopt(list(things), tag, backup)
        saver.pause(tag, missing_ok=True)
    if empty_cache:
        torch_cache.empty()


def load(*tags: str) -> None:
    """Resumes those of the tags that exist."""
    if tags:
        saver.resume(*tags, missing_ok=True)


def _trim_tags_of_the_dead() -> None:
    """Gives back what the tags of models and optimizers that are gone still hold, on the device and on the host."""
    with _lock:
        dead = list(filterfalse(lambda tag: _owners[tag]() is not None, _owners))
        for tag in dead:
            del _owners[tag]
    if dead:
        saver.trim(*dead, missing_ok=True)
