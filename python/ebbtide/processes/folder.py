"""The folder in which the processes of one user meet: one entry for each, which lives as long as its process.

An entry has three files: one in JSON, which is replaced as a whole; one that the process keeps locked, so that the
kernel tells that it lives; and a socket, to which words of one byte are sent. A process that finds files of a dead one
removes them. PIDs are for display only: containers have their own.
"""

import contextlib
import fcntl
import os
import re
import secrets
import socket
import stat
import time
from collections.abc import Iterable
from pathlib import Path

from ebbtide import settings
from ebbtide.errors import StateError
from ebbtide.processes.entries import LONGEST_TEXT, Entry, read_entry

_ENDINGS = (".sock", ".json.new", ".json", ".lock")  # in this order they are removed: the lock finds the rest
_NAME = re.compile(r"\d+-[0-9a-f]{8}")  # of an entry: the PID, and random digits
_own_names: set[str] = set()  # of this process, also of those that it has left
_ANSWER_SECONDS = 0.2
ROOM, ASK, ASKED = b"!", b"?", b"*"  # there may be room; tell what you hold; there is a request
_LONGEST_PATH = 107  # bytes of a socket's address


def path() -> Path:
    """Of the folder, which need not exist. The same for all processes of a user, unless EBBTIDE_SHARED_FOLDER says
    another: XDG_RUNTIME_DIR is not the same in a service and in a shell."""
    named = settings.read("shared_folder", os.environ)
    return Path(named).absolute() if named else Path(f"/dev/shm/ebbtide-{os.geteuid()}")


class Folder:
    """
    Raises: StateError: it can't be made, or it is not this user's alone.
    """

    def __init__(self, place: Path) -> None:
        self.place = place
        if len(os.fsencode(place)) > _LONGEST_PATH - len("/4194304-01234567.sock"):
            raise StateError(f"{place} is too long for the address of a socket: EBBTIDE_SHARED_FOLDER=/dev/shm/...")
        try:
            with contextlib.suppress(FileExistsError):
                place.mkdir(mode=0o700)
            found = place.lstat()
        except OSError as error:
            raise StateError(f"{place} can't be used: {error.strerror}") from None
        if not stat.S_ISDIR(found.st_mode):
            raise StateError(f"{place} is no folder")
        if found.st_uid != os.geteuid():
            raise StateError(f"{place} is another user's")
        if found.st_mode & 0o077:
            raise StateError(f"{place} is open to other users: chmod 700 {place}")

    def entries(self) -> list[Entry]:
        """Of all other living processes. Files of dead ones are removed; what is no entry is left alone."""
        found = []
        for lock in sorted(self.place.glob("*.lock")):
            name = lock.stem
            # A lock of this process is none to itself, and to close its file would end it for the others.
            if not _NAME.fullmatch(name) or name in _own_names:
                continue
            if not _is_locked(lock):
                self.remove(name)
                continue
            text = read(self.place / f"{name}.json")
            entry = None if text is None else read_entry(name, text)
            if entry is not None:
                found.append(entry)
        return found

    def fresh_entries(self) -> list[Entry]:
        """The same, after all have told anew what they hold. A process that does not answer soon, as it is stopped or
        holds the GIL, is as it told last."""
        asked_at = time.monotonic_ns()
        deadline = asked_at + _ANSWER_SECONDS * 1e9
        self.send(ASK, [entry.name for entry in self.entries()])
        while True:
            found = self.entries()
            if time.monotonic_ns() > deadline or all(entry.told_at >= asked_at for entry in found):
                return found
            time.sleep(_ANSWER_SECONDS / 50)

    def remove(self, name: str) -> None:
        """With the requests to it."""
        last = [self.place / (name + ending) for ending in _ENDINGS]
        for file in [*sorted(set(self.place.glob(f"{name}.*")) - set(last)), *last]:
            with contextlib.suppress(OSError):
                file.unlink()

    def write(self, entry: Entry) -> None:
        """Replaces the entry: a reader sees the old one or the new one."""
        new = self.place / f"{entry.name}.json.new"
        try:
            new.write_text(entry.to_text())
            new.replace(self.place / f"{entry.name}.json")
        except OSError as error:
            raise StateError(f"{new} can't be written: {error.strerror}") from None

    def send(self, word: bytes, names: Iterable[str]) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender:
            for name in names:
                with contextlib.suppress(OSError):  # it is gone, or has more words than it reads
                    sender.sendto(word, os.fspath(self.place / f"{name}.sock"))


def was_own(name: str) -> bool:
    """Whether it is, or was, the name of an entry of this process."""
    return name in _own_names


class Membership:
    """The files of this process, from now until `leave` or its end."""

    def __init__(self, folder: Folder) -> None:
        self.folder, self.pid = folder, os.getpid()
        self.name = f"{self.pid}-{secrets.token_hex(4)}"
        _own_names.add(self.name)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        try:
            # Locked before it has a name, since unlocked files are removed. The lock is this process's, and no child's.
            # Nothing else here may open the file: to close it would unlock it.
            self._lock = os.open(folder.place, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            lock = folder.place / f"{self.name}.lock"
            os.link(f"/proc/self/fd/{self._lock}", lock, src_dir_fd=self._lock)  # only with src_dir_fd it follows links
            self.socket.bind(os.fspath(folder.place / f"{self.name}.sock"))
        except OSError as error:
            folder.remove(self.name)
            self.socket.close()
            raise StateError(f"{folder.place} can't be used: {error.strerror}") from None

    def is_there(self) -> bool:
        return (self.folder.place / f"{self.name}.lock").exists()

    def leave(self) -> None:
        self.folder.remove(self.name)
        self.close()

    def close(self) -> None:
        """Without an effect on the files: in a forked child."""
        self.socket.close()
        os.close(self._lock)


def _is_locked(lock: Path) -> bool:
    try:
        file = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return True  # gone, or none of ours: not for us to judge
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            return True
        fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # others who look at a dead one's must not see it locked
        return False
    except OSError:
        return True
    finally:
        os.close(file)


def read(file: Path) -> bytes | None:
    """None: it is gone, too long, or no plain file of this user's."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as reader:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            return None
        text = reader.read(LONGEST_TEXT + 1)
    return text if len(text) <= LONGEST_TEXT else None
