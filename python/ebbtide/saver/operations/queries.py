"""Questions that change nothing: `saver.stats`, `saver.tags`, `saver.timeline`, `saver.where`, `saver.backup_of`,
`saver.order`."""

import warnings
from typing import TYPE_CHECKING, Any

from ebbtide import _core, driver_choice
from ebbtide.errors import StateError
from ebbtide.saver.pools.region_pools import registry
from ebbtide.saver.state.known_tags import check_known
from ebbtide.saver.tensors.plain import check_plain
from ebbtide.saver.tensors.ranges import range_of, ranges_of
from ebbtide.saver.values.arguments import check_flag, check_tag
from ebbtide.saver.values.order import Order
from ebbtide.saver.values.reports import Event, TagStatus, TagTable
from ebbtide.saver.values.whereabouts import Whereabouts

if TYPE_CHECKING:
    import torch


def stats() -> dict[str, int]:
    """The core's counters and sizes in bytes, and `pools_made`, the number of pools made for regions. Empty where
    ebbtide is off.

        print(saver.stats()["host_held_bytes"])

    `device_bytes` counts the tags' memory on the device. It leaves out tensors that died behind a handle that others
    share (see `configure(shared_handle=)`), although the device lacks that memory until the next pause.
    """
    if driver_choice.is_off():
        return {}
    return {**_core.stats(), "pools_made": registry.made}


def tags() -> TagTable:
    """Every tag that was ever named, with its state and sizes; `print` shows a table. Empty where ebbtide is off.

    For example:

        print(saver.tags())
    """
    if driver_choice.is_off():
        return TagTable()
    return TagTable.of(TagStatus.from_core(info) for info in _core.tags())


def is_paused(tag: str) -> bool:
    """Whether `tag` is paused, or left midway: any of its memory is away, or spilled and left where it is by a pause.
    False where ebbtide is off.

        if saver.is_paused("weights"):
            saver.resume("weights")

    Raises:
        TypeError, ValueError: not a tag.
        StateError: no region ever named it.
    """
    check_tag(tag)
    if driver_choice.is_off():
        return False
    info = _core.query_tag(tag)
    if info is None:
        check_known([tag])
    return info is not None and info.state in ("paused", "partial")


def timeline() -> list[Event]:
    """The newest 1,024 events, oldest first: pauses, resumes and other operations, and failures. Empty where ebbtide is
    off."""
    if driver_choice.is_off():
        return []
    return [Event(*event) for event in _core.events()]


def backup_of(tensor: "torch.Tensor", writable: bool = False, *, retained: bool = False) -> "torch.Tensor | None":
    """A view of a paused tensor's stored bytes: a CPU tensor of its dtype, shape and strides, made without a copy.

        saver.pause("weights")
        stored = saver.backup_of(model.weight)

    None while the tensor is resident (`where` tells), and for a tensor without bytes.

    The view keeps its bytes alive, also after a resume. A resume does not retain a backup that has a view.

    Writes into the view before the resume come back with the resume. The next pause copies every block that had a view,
    written or not. Two kinds of writes go unnoticed: those made while the tag is being paused or resumed, and those
    through a bare address (data_ptr) after the view is gone, when the memory may belong to others.

    Args:
        writable: True states that you mean to write. torch has no read-only tensors, so a write has the same effect
            either way.
        retained: True also shows the backup of a resident tensor, if a resume retained it (`retain=True`, or a pinned
            backup): its bytes as they were when it was paused last, at the same address as then (of a tensor that was
            made or adopted since: those of the earlier content). Such a view does not keep a resume from retaining
            the backup, and the next pause refreshes its bytes where they are. While that pause runs they are of no
            use. If it is told another kind of backup, or if an ordinary view lives as well, it makes another backup,
            and this view stays with the old one. A write into the view of a resident tensor reaches nothing: the next
            pause overwrites it.

    Raises:
        TypeError: not a tensor with plain strided memory.
        StateError: the tensor is in no region's memory, or its content was dropped: neither has a backup. Or a part of
            it has spilled to host memory, or was demoted to it, where a pause leaves it, so that no single range holds
            all of its bytes. Call `promote` before the pause.
        StoreError: a block that is stored as one repeated value must be expanded, and there is no room.
    """
    check_plain(tensor, "backup_of", is_read=True)
    check_flag(writable, "writable")
    check_flag(retained, "retained")
    if driver_choice.is_off():
        return None
    reached = range_of(tensor)
    if reached is None:
        return None
    info = _core.find(reached[0])
    if info is None:
        raise StateError(
            f"{_described(tensor)} is not in memory of ebbtide, so nothing backs it up: make it in a region, or "
            "move it into a tag with saver.adopt"
        )
    backup = _core.backup_of(*reached, writable, retained)
    if backup is not None:
        return _view(backup, tensor)
    if any(place == "dropped" for _, _, place, _ in _core.stretches(*reached)):
        raise StateError(
            f"{_described(tensor)} was dropped with its tag '{info.tag}', which keeps no backup: nothing of it is "
            "left. It comes back as zeros; give the region or the pause a backup to keep its bytes"
        )
    return None


def where(tensor: "torch.Tensor") -> Whereabouts:
    """Where a tensor's bytes are: on the device, on the host, in a backup, dropped, or in memory that is not ebbtide's.

        print(saver.where(model.weight))  # 64.0 MiB stored (tag weights)

    It never touches the bytes, so it may be asked while they are away, and while an operation moves them.

    Raises:
        TypeError: not a tensor with plain strided memory.
    """
    check_plain(tensor, "where", is_read=False)
    device = tensor.get_device() if tensor.is_cuda else None
    reached = range_of(tensor)
    if reached is None:
        return Whereabouts(None, device)
    info = None if driver_choice.is_off() else _core.find(reached[0])
    if info is None:
        return Whereabouts(None, device, outside_bytes=reached[1])
    found = dict.fromkeys(("device", "host", "stored", "dropped"), 0)
    for _, size_bytes, place, _ in _core.stretches(*reached):
        found[place] += size_bytes
    return Whereabouts(info.tag, info.device, **{f"{place}_bytes": size for place, size in found.items()})


def order(things: Any) -> Order:
    """Looks up once the addresses that `resume(order=)` and `Pending.stream_wait(tensors=)` need, for programs
    that wake up often: about a millisecond for 290 tensors.

        first = saver.order(model)
        saver.resume("weights", wait=False, order=first)

    It notes addresses, which pauses and resumes do not change. Make a new one after tensors were added, replaced or
    moved (`saver.adopt`, `model.to`, `tensor.data = ...`, the first step under large model support): those would not
    be among the first, and `stream_wait` would not wait for them.

    Args:
        things: a tensor, a module (its parameters and buffers), an optimizer (its states), or a container of these; a
            list may have orders as well.

    Raises:
        TypeError: something else.
    """
    return Order(ranges_of(things, "order"))


def _described(tensor: "torch.Tensor") -> str:
    return f"a tensor of shape {tuple(tensor.shape)} on {tensor.device}"


def _view(backup: "_core.Backup", tensor: "torch.Tensor") -> "torch.Tensor":
    import torch

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")  # torch has no read-only tensors
        flat = torch.frombuffer(backup, dtype=torch.uint8)
    view = flat.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), 0)
    view = view.conj() if tensor.is_conj() else view
    return view._neg_view() if tensor.is_neg() else view
