"""`saver.outside`: which tensors of a model and its optimizer no pause takes along."""

import sys
from collections import Counter
from typing import Any

from ebbtide import _core, driver_choice
from ebbtide.saver.regions import startup
from ebbtide.saver.state.known_tags import check_known
from ebbtide.saver.tensors import living
from ebbtide.saver.tensors.walk import FoundTensor, TensorWalk
from ebbtide.saver.values.arguments import check_tag
from ebbtide.saver.values.outside import Outside, OutsideTensor


def outside(*objects: Any, tag: str | None = None) -> Outside:
    """Which parameters, buffers, gradients and optimizer states lie outside every tag, or outside `tag`. A pause leaves
    them on the device.

        print(saver.outside(model, optimizer))  # 192.0 MiB of 256.0 MiB lie in no tag: ...

    Gradients are made by `backward()`, and the states of most optimizers by the first `step()`: often after the region
    was left. Ask after that step. It moves nothing and never touches the bytes, so it may be asked while they are away.

    Args:
        objects: as in `adopt`: tensors, modules (parameters, buffers, gradients), optimizers (states, groups),
            mappings, sequences, sets and dataclasses of these.
        tag: memory of other tags is outside as well, with its tag. None: only memory of no tag.

    Returns:
        An Outside, which is false if nothing lies outside. Its `passed_by` names objects that it did not look into,
        such as those of other classes in `locals()`. It leaves out memory that is not the device's: tensors on the CPU
        (but for the simulated device, whose memory they are) and tensors without a storage. It is empty where ebbtide
        is off.

    Raises:
        TypeError: no object, or one that cannot hold tensors.
        TypeError, ValueError: not a tag.
        StateError: no region ever named the tag; this is a forked child; or regions cannot work here (see `region`).
    """
    if tag is not None:
        check_tag(tag)
    if not objects:
        raise TypeError("outside takes at least one object: saver.outside(model, optimizer)")
    walk = TensorWalk("outside")
    found = [each for thing in objects for each in walk.find(thing)]
    backend = None if driver_choice.is_off() else startup.backend()
    if backend is None:
        return Outside(tag)
    if tag is not None:
        check_known([tag])
    inside = 0
    apart: dict[int, tuple[FoundTensor, int, str | None]] = {}
    places: set[int] = set()
    for each in found:
        memory = living.device_range(each.tensor, backend.device_type)
        if memory is None or memory[0] in places:
            continue
        address, size_bytes = memory
        places.add(address)
        info = _core.find(address)
        if info is not None and tag in (None, info.tag):
            inside += size_bytes
        else:
            apart[address] = each, size_bytes, None if info is None else info.tag
    holders = living.Holders([*walk.seen, sys.modules.get("__main__")], globals()) if apart else None
    rows = [
        OutsideTensor(_name(each, holders), each.kind, size, max(each.tensor.get_device(), 0), other, address)
        for address, (each, size, other) in apart.items()
    ]
    by_kind: Counter[str] = Counter()
    for row in rows:
        by_kind[row.kind] += row.bytes
    rows.sort(key=lambda row: (-row.bytes, row.address))
    return Outside(tag, by_kind.total(), inside, dict(by_kind), tuple(rows), walk.passed_by)


def _name(found: FoundTensor, holders: living.Holders | None) -> str:
    return (holders and holders.name_of(found.owner)) or living.describe(found.owner)
