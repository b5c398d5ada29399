"""Connections between two processes of one user: for descriptors, and to know when the other has ended.

One thread of this process reads them all, and does all that follows: what it does, nothing else does beside it. A
message is a JSON object in one packet, which may carry descriptors. Nothing that was sent is executed.
"""

import contextlib
import heapq
import itertools
import json
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ebbtide.errors import Error, StateError
from ebbtide.locks import make_lock, make_signal
from ebbtide.stderr import say

VERSION = 1
MOST_FILES = 253  # the kernel takes no more in a message
_LONGEST = 1 << 17  # bytes of a message
_SEND_SECONDS = 5.0
ENDING = ".link"  # of the socket's file in the folder

Message = dict[str, Any]
Task = Callable[[], object]

_lock = make_lock()


class _Thread(NamedTuple):
    tasks: "deque[Task]"
    wake: socket.socket
    poll: Any
    callbacks: dict[int, Task]  # by descriptor
    due: list[tuple[float, int, Task]]
    ident: list[int]  # once it runs


_thread: _Thread | None = None
_numbers = itertools.count()


def _the_thread() -> _Thread:
    global _thread
    with _lock:
        if _thread is None:
            mine, wake = socket.socketpair()
            made = _Thread(deque(), wake, select.poll(), {}, [], [])
            _listen(made, mine, lambda: mine.recv(4096))
            threading.Thread(target=_run, args=(made,), name="ebbtide-links", daemon=True).start()
            _thread = made
        return _thread


def post(task: Task) -> None:
    """The thread does it soon. For finalizers too: never waits."""
    thread = _the_thread()
    thread.tasks.append(task)
    _wake(thread)


def later(seconds: float, task: Task) -> None:
    """The thread does it then. Called by that thread."""
    heapq.heappush(_the_thread().due, (time.monotonic() + seconds, next(_numbers), task))


class Result:
    """What the thread, or another process, will answer, once."""

    def __init__(self) -> None:
        self._is_there = make_signal()
        self._value: Any = None
        self._error: BaseException | None = None
        self._is_answered = False

    def put(self, value: object = None) -> None:
        self._answer(value, None)

    def fail(self, error: BaseException) -> None:
        self._answer(None, error)

    def _answer(self, value: object, error: BaseException | None) -> None:
        if not self._is_answered:
            self._is_answered, self._value, self._error = True, value, error
            self._is_there.release()

    def get(self, seconds: float) -> Any:
        """
        Raises: StateError: no answer came in that time. What `fail` was given.
        """
        if not self._is_there.acquire(timeout=seconds):
            raise StateError(f"no answer came in {seconds:g} seconds")
        if self._error is not None:
            raise self._error
        return self._value


def ask(task: Callable[[], Any], seconds: float) -> Any:
    """The same in the thread, whose result or error this returns or raises."""
    if _thread is not None and threading.get_ident() in _thread.ident:
        return task()
    result = Result()

    def answer() -> None:
        try:
            result.put(task())
        except Exception as error:
            result.fail(error)

    post(answer)
    return result.get(seconds)


def _listen(thread: _Thread, file: socket.socket, callback: Task) -> None:
    thread.callbacks[file.fileno()] = callback
    thread.poll.register(file, select.POLLIN)
    _wake(thread)  # which polls those that it knew when it began


def _wake(thread: _Thread) -> None:
    with contextlib.suppress(BlockingIOError):  # it has words enough to wake up
        thread.wake.send(b"!", socket.MSG_DONTWAIT)


def _run(me: _Thread) -> None:
    me.ident.append(threading.get_ident())
    while True:
        wait = None if not me.due else max(0.0, 1000 * (me.due[0][0] - time.monotonic()))
        for file, _ in me.poll.poll(wait):
            _do(me.callbacks.get(file, int))
        while me.tasks:
            _do(me.tasks.popleft())
        while me.due and me.due[0][0] <= time.monotonic():
            _do(heapq.heappop(me.due)[2])


def _do(task: Task) -> None:
    try:
        task()
    except Exception as error:  # the thread goes on
        say(f"memory of several processes: {error if isinstance(error, Error) else repr(error)}")


class Link:
    """One end of a connection. All but `send` is the thread's."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self.is_open = True

    def start(self, on_message: "Callable[[Message, list[int]], None]", on_end: Task) -> None:
        """From now on calls these: the descriptors are on_message's to close."""
        self._on_message, self._on_end = on_message, on_end
        _listen(_the_thread(), self._socket, self._read)

    def send(self, message: Message, files: Sequence[int] = ()) -> None:
        """
        Raises: StateError: the other has ended, or does not read.
        """
        text = json.dumps(message).encode()
        if len(text) > _LONGEST or len(files) > MOST_FILES:
            raise StateError("this is too much for one message between processes")
        try:
            socket.send_fds(self._socket, [text], list(files))
        except OSError as error:
            raise StateError(f"the other process can't be told: {error}") from None

    def end(self) -> None:
        if self.is_open:
            self.is_open = False
            thread = _the_thread()
            thread.callbacks.pop(self._socket.fileno(), None)
            with contextlib.suppress(KeyError):
                thread.poll.unregister(self._socket)
            self._socket.close()
            self._on_end()

    def close_in_child(self) -> None:
        self.is_open = False
        self._socket.close()

    def _read(self) -> None:
        flags = socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
        try:
            text, files, found, _ = socket.recv_fds(self._socket, _LONGEST + 1, MOST_FILES, flags)
        except BlockingIOError:
            return None
        except OSError:
            return self.end()
        try:
            message = json.loads(text) if text and not found & socket.MSG_TRUNC else None
            if not isinstance(message, dict):
                return self.end()
            if found & socket.MSG_CTRUNC:  # RLIMIT_NOFILE
                message["problem"] = "this process may open no more files: raise its limit (ulimit -n)"
            self._on_message(message, files)
        except (ValueError, TypeError, KeyError, RecursionError):  # of another version, or none of ours
            self.end()
        finally:
            for file in files:
                os.close(file)


def listen(place: Path, on_link: Callable[[Link], None]) -> Task:
    """Accepts connections of this user's processes at this path. Returns a function that ends this.

    Raises: StateError: the path can't be used.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    try:
        listener.bind(os.fspath(place))
        listener.listen()
    except OSError as error:
        listener.close()
        raise StateError(f"{place} can't be used: {error.strerror}") from None

    def accept() -> None:
        try:
            connected, _ = listener.accept()
        except OSError:
            return
        if _is_this_user(connected):
            connected.settimeout(_SEND_SECONDS)
            on_link(Link(connected))
        else:
            connected.close()

    thread = _the_thread()
    _listen(thread, listener, accept)

    def end() -> None:
        thread.callbacks.pop(listener.fileno(), None)
        with contextlib.suppress(KeyError):
            thread.poll.unregister(listener)
        listener.close()

    return end


def connect(place: Path) -> Link:
    """
    Raises: StateError: nobody of this user listens there.
    """
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connected.settimeout(_SEND_SECONDS)
        connected.connect(os.fspath(place))
        if not _is_this_user(connected):
            raise StateError(f"{place} is another user's")
    except OSError as error:
        connected.close()
        raise StateError(f"{place}: {error.strerror}") from None
    except StateError:
        connected.close()
        raise
    return Link(connected)


def _is_this_user(connected: socket.socket) -> bool:
    """A user of another user namespace shows as the overflow user, which stands for many."""
    _, user, _ = struct.unpack("3i", connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return user == os.geteuid() and user != _overflow_user()


def _overflow_user() -> int:
    try:
        return int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return 65534


def number(message: Message, name: str) -> int:
    """
    Raises: ValueError: the message has no such number.
    """
    value = message.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 63:
        raise ValueError(f"{name} is no number")
    return value


def text(message: Message, name: str) -> str:
    """
    Raises: ValueError: the message has no such text.
    """
    value = message.get(name)
    if not isinstance(value, str) or len(value) > 4096:
        raise ValueError(f"{name} is no text")
    return value


def forget_parent() -> None:
    """In a forked child: the thread is the parent's."""
    global _thread
    _thread = None
