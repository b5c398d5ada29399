"""The file in which the processes of one run count host memory (EBBTIDE_LEDGER): its name, and its removal.

`ebbtide run` becomes the program, so nothing is left to clean up after it. It only names the file. The core makes the
file at first need, and each process that counts in it locks its own part. The kernel drops that lock when the process
is gone. A file without locks counts nothing, and the next run removes it.

The file may vanish between two processes of one run. So a process that opens it creates it if it is missing, waits for
its first lock, and opens it again if the file has lost its name by then (st_nlink is 0).
"""

import fcntl
import functools
import os
import secrets
import stat
import struct
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from ebbtide.errors import StateError

VARIABLE = "EBBTIDE_LEDGER"
PREFIX = "ebbtide-ledger-"


def name_for(inherited: Mapping[str, str]) -> str:
    """The name of the ledger of the run that this process belongs to, or else of its own. An absolute path, since the
    processes of a run may be in different folders."""
    named = inherited.get(VARIABLE)
    try:
        return str(Path(named).absolute()) if named else own_name()
    except FileNotFoundError:
        raise StateError(
            f"{VARIABLE}={named} is a path from the current folder, which is gone: give an absolute one"
        ) from None


@functools.cache
def own_name() -> str:
    """The name of the ledger of this process: always the same, since everything that it starts is one run.

    Raises:
        StateError: there is no folder for it.
    """
    for folder in folders():
        if os.access(folder, os.W_OK | os.X_OK):
            return str(folder / f"{PREFIX}{secrets.token_hex(8)}")
    raise StateError("there is no folder for the run's ledger: set XDG_RUNTIME_DIR to one that can be written to")


def folders() -> list[Path]:
    """The possible folders that exist, in the order of choice. Their content need not survive a reboot."""
    named = [os.environ.get("XDG_RUNTIME_DIR", ""), "/dev/shm", tempfile.gettempdir()]
    return [Path(folder) for folder in dict.fromkeys(named) if folder.startswith("/") and Path(folder).is_dir()]


def sweep() -> list[Path]:
    """Removes the user's ledgers that no process holds; returns their paths."""
    return [path for path in _ledgers() if _remove_unless_held(path)]


def _ledgers() -> Iterator[Path]:
    for folder in folders():
        try:
            yield from sorted(folder.glob(f"{PREFIX}*"))
        except OSError:  # a folder that can't be listed
            continue


def _remove_unless_held(path: Path) -> bool:
    try:
        # Not blocking: it might be a pipe.
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            return False
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _whole_file_lock())
        # Only the holder of the whole lock removes the file: if it has its name now, it keeps it until we are done.
        if os.fstat(descriptor).st_nlink == 0:
            return False
        path.unlink()
        return True
    except OSError:  # held
        return False
    finally:
        os.close(descriptor)


def _whole_file_lock() -> bytes:
    """struct flock: exclusive, from the start, of any length."""
    return struct.pack("hhqqi0q", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
