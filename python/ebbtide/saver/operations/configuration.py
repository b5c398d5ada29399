"""`saver.configure`: limits of ebbtide's memory, and the blocks that a pause may skip."""

import contextlib
import os
from enum import Enum
from typing import Any, Final, Literal, TypeAlias

from ebbtide import _core, driver_choice, settings
from ebbtide.errors import Error, StateError
from ebbtide.processes import member
from ebbtide.saver.pools import backends
from ebbtide.saver.telling import watch
from ebbtide.saver.values.arguments import Tags, check_flag, check_tags
from ebbtide.settings import Setting
from ebbtide.sizes import format_size


class _Unchanged(Enum):
    UNCHANGED = "as it is"

    def __repr__(self) -> str:
        return "UNCHANGED"


UNCHANGED: Final = _Unchanged.UNCHANGED
Limit: TypeAlias = str | int | Literal[_Unchanged.UNCHANGED] | None
Switch: TypeAlias = bool | Literal[_Unchanged.UNCHANGED]
Folder: TypeAlias = str | os.PathLike[str] | Literal[_Unchanged.UNCHANGED] | None
Shows: TypeAlias = watch.Display | Literal[_Unchanged.UNCHANGED]
Offered: TypeAlias = Tags | Literal[_Unchanged.UNCHANGED] | None
Files: TypeAlias = Literal["hidden", "named", _Unchanged.UNCHANGED]


def configure(
    *,
    disk_files: Files = UNCHANGED,  # before the folder, which may depend on it
    disk_directory: Folder = UNCHANGED,  # before the others, since the file system may refuse it
    device_limit: Limit = UNCHANGED,
    device_margin: Limit = UNCHANGED,
    host_limit: Limit = UNCHANGED,
    host_margin: Limit = UNCHANGED,
    pinned_limit: Limit = UNCHANGED,
    reserve: Limit = UNCHANGED,
    host_pool: Limit = UNCHANGED,
    shared_handle: Limit = UNCHANGED,
    skip_clean: Switch = UNCHANGED,
    skip_unused: Switch = UNCHANGED,
    skip_constant: Switch = UNCHANGED,
    poison: Switch = UNCHANGED,
    clear_handed: Switch = UNCHANGED,
    copy_ahead: Switch = UNCHANGED,
    progress: Shows = UNCHANGED,
    shared: Switch = UNCHANGED,
    give_up: Offered = UNCHANGED,
) -> None:
    """Sets limits and switches; arguments that are left out stay as they are. All are checked before any is set.

        saver.configure(host_margin="2GiB", skip_constant=False)

    Args:
        device_limit: the most that ebbtide may hold on each device ("16GiB" or bytes); None: no limit.
        device_margin: free memory of each device that new allocations leave to others ("1GiB" or bytes); 0 leaves
            nothing. One that would leave less is out of memory, so that torch gives its cache back and asks again; in
            a region that overflows it lies on the host. A resume may use it.
        host_limit: the most host memory that it may hold; None: no limit but RAM and the container's.
        host_margin: host memory that it leaves to others ("1GiB" or bytes).
        pinned_limit: the most pinned memory that it may hold, for its rings and for pinned backups; None: no limit.
        reserve: device memory that spills and promotions leave free, on each device; None: 512 MiB, or a sixteenth of
            the device where that is less. Allocations of up to 2 MiB may use half of it, and large ones that may
            spill leave them a part of device_limit: a 32nd, at most 64 MiB and half the reserve.
        host_pool: host memory that is made ahead and kept for spills, which otherwise wait for it; 0 keeps none. Where
            a backup or a spill finds no room beside it, it gives way.
        shared_handle: segments of a tag that lie side by side come back behind one driver handle of at most this size,
            which makes the next resumes and pauses faster; dead ones of them give their memory back when all do,
            or at the next pause. 0: each segment keeps handles of its own.
        disk_directory: the folder of disk backups that are made from now on; None: EBBTIDE_DISK_DIRECTORY, else TMPDIR,
            else /var/tmp. It must exist, be writable and lie on a disk, not on tmpfs. A relative path means the folder
            that it names now.
        disk_files: "hidden": files of disk backups that are made from now on have no name, and nothing of them is left
            however the process ends. "named": the folder shows a file for each allocation, ebbtide_backup_..., while
            its bytes are stored. It goes when the backup does and at exit; files of a killed process go when the
            next process makes named files there. A disk_directory in RAM is allowed then, with one warning: no budget
            counts its files.
        skip_clean: whether a pause leaves out blocks of 2 MiB that did not change since their backup was made, by a
            seeded digest of 128 bits. A change within 16 bytes is always seen; that another one is missed has odds of
            about 2**-128 (an estimate, not a proof).
        skip_unused: whether it leaves out blocks that torch holds free, and a resume segments of which all is free.
            Their content is gone then.
        skip_constant: whether it keeps blocks of one repeated value of 16 bytes as that value.
        poison: whether memory whose content was dropped (by backup=None, as unused, or by a trim) comes back as bytes
            0xEB and not as zeros, so that a program that relied on its content is found.
        clear_handed: whether memory that `hand_over` takes to another process, or that a resume takes from one, is
            cleared where nothing overwrites it. Only where both processes say False, memory without a backup shows
            what the other one had there: a program that writes before it reads saves the time of clearing.
        copy_ahead: whether a thread keeps the backups of tags that were resumed ahead of their next pause, as
            `prepare(copy=True, wait=False)` does once: it copies the changed blocks, and rests for 20 times as long,
            a second at least. It ends for a tag that is paused, and for all with copy_ahead=False. Resumes keep the
            backups for it unless they say retain=False; that host memory gives way to pauses and spills that need it.
            Where a region has retain=True, a block that is copied anew no longer shows the last pause:
            `backup_of(retained=True)` then gives None.
        progress: a function that gets a Progress, at most ten times a second, from a thread of ebbtide's, while an
            operation runs that takes longer than 0.1 s, and once at its end if it succeeds. An exception of it becomes
            one RuntimeWarning, and the function is not called again. None: operations that take longer than 1 s draw a
            bar if stderr is a terminal. False: nothing.
        shared: whether the processes of this user see what this one holds of each device (`ebbtide ps`), and a resume
            with a timeout waits in turn with theirs. A thread tells the others each second. Default: EBBTIDE_SHARED.
        give_up: tags that this process pauses at its next `safe_point` where a resume of another one has no room and
            waits for it. None: none. They come back in a `safe_point(wait=True)`, or by `resume`.

    Raises:
        TypeError, ValueError: malformed sizes, switches that are no bool, a host_pool beyond the machine's RAM; a
            malformed variable of ebbtide's.
        StoreError: no backup could be made in disk_directory, and nothing is set. Or the host has too little for
            host_pool; then all is set, and the memory already made stays.
    """
    given = {name: value for name, value in vars().items() if value is not UNCHANGED}
    shown = given.pop("progress", UNCHANGED)
    joins = given.pop("shared", UNCHANGED)
    offered = None
    if (tags := given.pop("give_up", UNCHANGED)) is not UNCHANGED:
        offered = [] if tags is None else check_tags((tags,))
    if joins is not UNCHANGED:
        check_flag(joins, "shared")
    if shown is not UNCHANGED:
        watch.check_display(shown)
    is_off = driver_choice.is_off()
    has_files = given.get("disk_files") is not None
    texts = {
        name: _check(settings.find(name), value, is_off or (has_files and name == "disk_directory"))
        for name, value in given.items()
    }
    _check_host_pool(texts)
    if is_off:
        return
    files, folder = texts.get("disk_files"), texts.get("disk_directory")
    if files is not None and folder is not None:
        _core.check_disk_directory(os.fsencode(folder), files)
    settings.check_environment()
    _set_all(texts)
    if shown is not UNCHANGED:
        watch.set_display(shown)
    if "host_pool" in texts:
        _fill_host_pool()
    if offered is not None:
        member.give_up(offered)
    if joins is not UNCHANGED:
        member.configure(bool(joins))


def _set_all(texts: dict[str, str | None]) -> None:
    """Sets all of them, or none."""
    before = {name: _core.get_setting(name) for name in texts}
    done = []
    try:
        for name, text in texts.items():
            done.append(name)
            _core.configure(name, None if text is None else os.fsencode(text))
    except BaseException:
        for name in done:
            with contextlib.suppress(Error):  # a folder that is gone by now
                _core.configure(name, before[name] or None)
        raise


def settings_in_force() -> dict[str, Any]:
    """The settings in force, by `saver.configure`, a variable or the default: maps each argument to its value, which
    `configure` takes again. Sizes are bytes. `disk_directory` is None where `configure` did not set it. Empty where
    ebbtide is off.

        before = saver.settings()
        saver.configure(device_limit="16GiB", skip_clean=False)
        saver.configure(**before)

    Raises:
        ValueError: a malformed variable of ebbtide's.
    """
    if driver_choice.is_off():
        return {}
    settings.check_environment()
    configurable = [setting for setting in settings.all_settings() if setting.is_configurable]
    found = {setting.name: _value(setting, os.fsdecode(_core.get_setting(setting.name))) for setting in configurable}
    return {**found, "progress": watch.display(), "shared": member.is_shared(), "give_up": member.gives_up() or None}


def _value(setting: Setting, text: str) -> str | int | bool | None:
    if not text:
        return None
    if setting.kind == "switch":
        return text == "1"
    return int(text) if setting.kind == "size" else text


def _check(setting: Setting, value: object, is_form_enough: bool) -> str | None:
    if value is None and setting.none:
        return None
    if is_form_enough and setting.kind == "folder":  # no backup will be made there, or its use is checked apart
        return settings.as_text(setting, value, setting.name, takes_text=False)
    return settings.check(setting, value, setting.name, takes_text=False)


def _check_host_pool(texts: dict[str, str | None]) -> None:
    ram_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if (asked := int(texts.get("host_pool") or 0)) > ram_bytes:
        raise ValueError(
            f"host_pool is {format_size(asked)}, and this machine has {format_size(ram_bytes)} of RAM: ask for less"
        )
    if asked and driver_choice.is_hip():
        raise StateError(
            "overflow to the host does not work with HIP: leave overflow, demote and host_pool out, or pause tags to "
            "make room"
        )


def _fill_host_pool() -> None:
    backend = backends.existing_backend()  # without one, the first region that overflows fills the pool
    for device in backend.devices() if backend else ():
        _core.fill_host_pool(device)
