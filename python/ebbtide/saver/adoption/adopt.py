"""`saver.adopt`: tensors that already exist move into a tag.

A storage moves in place: the object stays, and only the memory behind it changes. So views, tied weights, gradients,
hooks and optimizer states that share it stay tied, and no user needs to be told.

A storage may only move if each of its users sees the move; `external_references` finds that out. Everything is checked
before anything moves. One storage moves at a time, so the extra memory is that of one storage. The tag is leased
meanwhile, so that no thread pauses it. After a failure midway the call may be repeated: it skips tensors in the tag.

Other operations move no storage. pause, resume, promote, demote and trim change the memory behind an address, never the
address. A DLPack partner then shares the tensor's fate, and a view of a backup (`saver.backup_of`) owns its bytes.
"""

import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from ebbtide import _core
from ebbtide.errors import StateError
from ebbtide.saver.adoption import storage_movers
from ebbtide.saver.pools import captures
from ebbtide.saver.pools.region_pools import holder_name
from ebbtide.saver.regions import startup
from ebbtide.saver.regions.region import Region
from ebbtide.saver.telling.log_lines import log_adoption
from ebbtide.saver.tensors.walk import TensorWalk, why_without_memory
from ebbtide.saver.values.arguments import BackupName, backup_code, check_flag, check_tag
from ebbtide.saver.values.reports import Adoption

if TYPE_CHECKING:
    import torch

NOT_OWN = "its memory is not torch's own, or was lent to NumPy: adopt a clone of it, or make the tensor in the region"


def adopt(*objects: Any, tag: str, backup: BackupName | None = "ram", force: bool = False) -> Adoption:
    """Moves the tensors in `objects` into `tag`, as if they had been made in its region. Tensors that share memory go
    on sharing it.

        saver.adopt(model, optimizer, tag="trainer")

    Addresses change once, here; so do it before CUDA graphs are captured over them and before libraries are told the
    addresses.

    Args:
        objects: tensors, modules (parameters, buffers, gradients), optimizers (states, groups), mappings, sequences,
            sets and dataclasses of these.
        tag, backup: as in `region`. Tensors in another tag, or in this tag with another backup, move as well.
        force: moves memory even if it may be lent out (see below). Anything that keeps the old address then reads and
            writes memory that belongs to others.

    Returns:
        An Adoption. Its `passed_by` names objects that it did not look into, such as those of other classes in
        `adopt(locals(), tag=...)`. It counts the tensors that it skips, by reason:

        - tensors on other devices, and tensors without memory of their own (fake, meta, uninitialized, opaque);
        - memory that is not torch's own, or that NumPy has a view of or had: NumPy never says that it is done;
        - memory that is shared between processes;
        - unless `force`, memory that may be lent out: torch counts more owners than it shows (partners of DLPack,
          TorchScript, C++ extensions), another library's object refers to the tensor, or its
          `__cuda_array_interface__` was read. Python can't see a kept bare `data_ptr()`.

    Raises:
        TypeError, ValueError: malformed arguments.
        StateError: a tensor is paused, is kept (`keep`) or used by another process; a capture is under way, or (see
            `region`) regions cannot work here. Nothing
            moved.
        torch.OutOfMemoryError: the device has too little room for one more storage; nothing is lost, and each tensor
            is whole in its old or new place.
    """
    check_flag(force, "force")
    return log_adoption(adopt_quietly(*objects, tag=tag, backup=backup, force=force))


def adopt_quietly(*objects: Any, tag: str, backup: BackupName | None = "ram", force: bool = False) -> Adoption:
    """`adopt`, for callers inside ebbtide, which hold locks: it logs nothing."""
    check_tag(tag)
    code = backup_code(backup)
    backend = startup.backend()
    if backend is None:
        return Adoption(tag)
    if captures.is_capturing():
        raise StateError("a CUDA graph capture is under way, and adopt changes addresses: adopt before or after it")
    start = time.perf_counter()
    found, users, skipped, passed_by = _find_storages(objects, backend.device_type)
    moved = 0
    with _core.Frame() as leases, Region(tag, backup=backup):
        moves = _choose_moves(found, tag, code, leases)
        already = len(found) - len(moves)
        if not force:
            moves = _leave_lent(moves, users, skipped)
        mover = storage_movers.make_mover(backend.device_type)
        try:
            for storage in moves:
                mover.move(storage)
                moved += storage.nbytes()
        finally:
            mover.finish()
    seconds = time.perf_counter() - start
    return Adoption(tag, moved, len(moves), already, dict(skipped), seconds, passed_by)


def _find_storages(
    objects: tuple[Any, ...], device_type: str
) -> "tuple[list[torch.UntypedStorage], Counter[int], Counter[str], dict[str, str]]":
    """The storages that could move, each once; how many tensors use each, by `_cdata`; how many tensors can't move, by
    reason; and the objects not looked into.
    """
    walk = TensorWalk()  # gone before the references to the tensors are counted
    storages: dict[int, torch.UntypedStorage] = {}
    users: Counter[int] = Counter()
    skipped: Counter[str] = Counter()
    for thing in objects:
        for tensor in walk.walk(thing):
            reason, storage = storage_to_move(tensor, device_type)
            if reason:
                skipped[reason] += 1
            elif storage is not None:
                storages[storage._cdata] = storage
                users[storage._cdata] += 1
    return list(storages.values()), users, skipped, walk.passed_by


def _leave_lent(
    moves: "list[torch.UntypedStorage]", users: Counter[int], skipped: Counter[str]
) -> "list[torch.UntypedStorage]":
    """The storages that are not lent out. Those that may be are counted as skipped."""
    from ebbtide.saver.adoption import external_references

    lent = external_references.find_lent(moves)
    for key, reason in lent.items():
        skipped[reason] += users[key]
    return [storage for storage in moves if storage._cdata not in lent]


def _choose_moves(
    storages: "list[torch.UntypedStorage]", tag: str, backup: int, leases: "_core.Frame"
) -> "list[torch.UntypedStorage]":
    """The storages that are not where they should be. The tags that they leave are leased too, so that no thread pauses
    them."""
    moves = []
    leased = {tag}
    for storage in storages:
        info = _core.find(storage.data_ptr())
        if info is None:
            moves.append(storage)
            continue
        if info.tag not in leased:
            leased.add(info.tag)
            leases.open_lease(info.tag, holder_name())
        if _core.is_away(storage.data_ptr(), storage.nbytes()):
            raise StateError(f"a tensor to adopt is paused: resume its tag {info.tag!r} first")
        if info.tag == tag and info.backup == backup:
            continue
        if info.is_kept or info.is_lent:
            user = "saver.keep keeps" if info.is_kept else "another process uses"
            raise StateError(f"{user} the memory of a tensor to adopt, in tag {info.tag!r}: it can't move now")
        moves.append(storage)
    return moves


def storage_to_move(tensor: "torch.Tensor", device_type: str) -> "tuple[str, torch.UntypedStorage | None]":
    """Why a tensor stays where it is, or else the storage that may move; neither for a tensor without bytes."""
    if tensor.device.type != device_type:
        return f"on {tensor.device.type}, not on {device_type}", None
    kind = why_without_memory(tensor)
    if kind is not None:
        return f"{kind}: it has no memory to move", None
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        return "", None
    try:
        storage.data_ptr()
    except RuntimeError:  # a subclass without bytes (a MaskedTensor, say), or a tensor known to be zeros
        return f"a {type(tensor).__name__} without bytes of its own: it has no memory to move", None
    if device_type == "cpu" and storage.is_shared():
        return "shared between processes", None
    if not storage.resizable():  # a storage that owns its memory can be resized
        return NOT_OWN, None
    return "", storage
