"""`saver.promote`: memory that spilled to the host moves to the device."""

from ebbtide import _core, driver_choice
from ebbtide.saver.operations.hooked_operation import run_alone
from ebbtide.saver.reclaim import spilled
from ebbtide.saver.telling.log_lines import log_report
from ebbtide.saver.values.arguments import Tags, check_flag, check_tags
from ebbtide.saver.values.reports import Report


def promote(*tags: Tags, missing_ok: bool = False) -> Report:
    """Moves memory that has spilled to the host to the device, the oldest first. Addresses and bytes stay the same.

        saver.promote("weights")

    It leaves free the reserve, and the part of the device's limit that only small allocations get (docs/overflow.md).
    What does not fit stays on the host. The host memory of free segments that torch caches is released, as with
    `trim`. Launch nothing that touches the tags meanwhile.

    Args:
        tags: tags, or a list of tags; none means every tag.
        missing_ok: skip tags that no region ever named.

    Returns:
        A Report: `bytes` is what moved; `saver.tags()` shows what is still on the host.

    Raises:
        TypeError, ValueError: malformed arguments.
        StateError: an unknown tag, a tag whose region is open, a capture under way. Nothing moved.
        DriverError: a driver call failed. Every byte is safe; promote again goes on, and resume brings back what a
            tag that is partial lacks.
    """
    names = check_tags(tags)
    check_flag(missing_ok, "missing_ok")
    if driver_choice.is_off():
        return Report("promote")
    for name in _core.preview("promote", names, missing_ok):
        spilled.release_free(name)
    return log_report(run_alone("promote", names, missing_ok), names)
