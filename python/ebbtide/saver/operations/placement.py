"""`saver.promote` and `saver.demote`: resident memory moves between the host and the device, which reaches both."""

from ebbtide import _core, driver_choice
from ebbtide.saver.operations.hooked_operation import run_alone
from ebbtide.saver.reclaim import spilled
from ebbtide.saver.telling.log_lines import log_report
from ebbtide.saver.values.arguments import Tags, check_flag, check_tags
from ebbtide.saver.values.reports import Report
from ebbtide.sizes import parse_size


def promote(*tags: Tags, missing_ok: bool = False) -> Report:
    """Moves memory that has spilled to the host to the device, the oldest first. Addresses and bytes stay the same.

        saver.promote("weights")

    It leaves free the reserve, and the part of the device's limit that only small allocations get (docs/overflow.md).
    Memory that does not fit stays on the host. The host memory of free segments that torch caches is released, as with
    `trim`. Launch nothing that touches the tags meanwhile.

    Args:
        tags: tags, or a list of tags; none means every tag.
        missing_ok: skip tags that no region ever named.

    Returns:
        A Report: `bytes` counts the moved memory; `saver.tags()` shows the rest on the host.

    Raises:
        TypeError, ValueError: malformed arguments.
        StateError: an unknown tag, a tag whose region is open, a capture under way. Nothing moved.
        DriverError: a driver call failed. Every byte is safe; promote again goes on, and resume brings back memory that
            a tag that is partial lacks.
    """
    names = check_tags(tags)
    check_flag(missing_ok, "missing_ok")
    if driver_choice.is_off():
        return Report("promote")
    for name in _core.preview("promote", names, missing_ok):
        spilled.release_free(name)
    return log_report(run_alone("promote", names, missing_ok), names)


def demote(*tags: Tags, max_bytes: int | str | None = None, missing_ok: bool = False) -> Report:
    """Moves memory from the device to the host, where kernels, graphs and copies still read and write it at the same
    addresses, over the bus (docs/overflow.md says how slowly). `promote` is the way back.

        saver.demote("weights", max_bytes="4GiB")

    Every policy allows it, also without `overflow`. Memory that is paused or on the host already is skipped. Moved
    memory counts and behaves as spilled memory does: a pause with a backup leaves it there, one without drops it. It
    moves in the order of addresses and in whole pieces, which are driver handles: of up to 1 GiB, if a resume has put
    neighbours behind one (configure(shared_handle=)). A piece that is larger than the rest of `max_bytes` is passed
    over. Free segments that torch caches move as well: call `trim` first. Launch nothing that touches the tags
    meanwhile.

    Args:
        tags: tags, or a list of tags; none means every tag.
        max_bytes: no more device memory than this is given up, such as "4GiB"; None: no bound.
        missing_ok: skip tags that no region ever named.

    Returns:
        A Report: `bytes` is the device memory that is free now; `saver.tags()` shows the memory on the host.

    Raises:
        TypeError, ValueError: malformed arguments.
        StateError: an unknown tag, a tag whose region is open, a capture under way. Nothing moved.
        StoreError: the host has too little memory for all of it. Nothing moved.
        DriverError: a driver call failed. Every byte is safe; demote again goes on, and resume brings back memory that
            a tag that is partial lacks.
    """
    names = check_tags(tags)
    check_flag(missing_ok, "missing_ok")
    limit = _core.UNLIMITED if max_bytes is None else parse_size(max_bytes, "max_bytes")
    if driver_choice.is_off():
        return Report("demote")
    return log_report(run_alone("demote", names, missing_ok, max_bytes=limit), names)
