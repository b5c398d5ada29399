"""A second process with a driver of its own, which runs functions for a test."""

import array
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from driver_calls import Driver

HERE = Path(__file__).resolve().parent
_MOST_FILES = 64


class OtherProcess:
    """Starts with cuInit and the primary context of device 0 current. `run` calls a module-level function of a test
    there, with the driver, these arguments and, if there are any, copies of the descriptors in `files`. It gives what
    the function returns, of `Files` copies."""

    def __init__(self, path: str, **variables: str) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        code = f"import sys; sys.path[:0] = [{str(HERE)!r}]; import other_process as o; o.serve({path!r})"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=theirs, env={**os.environ, **variables}, cwd=HERE
        )
        theirs.close()
        self._socket.settimeout(120)

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self, function: Callable[..., Any], *arguments: object, files: list[int] | None = None) -> None:
        text = pickle.dumps((function.__module__, function.__name__, arguments))
        socket.send_fds(self._socket, [text], files or [])

    def result(self) -> Any:
        """Of the function that was started."""
        try:
            text, files, _, _ = socket.recv_fds(self._socket, 1 << 16, _MOST_FILES)
        except ConnectionError:  # a call was on its way
            text = b""
        assert text, f"the other process ended with {self._process.wait()}"
        is_error, found = pickle.loads(text)
        assert not is_error, found
        return list(files) if files else found

    def run(self, function: Callable[..., Any], *arguments: object, files: list[int] | None = None) -> Any:
        self.start(function, *arguments, files=files)
        return self.result()

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        self._socket.close()
        self._process.wait(timeout=60)


class Files(list[int]):
    """Descriptors, as the result of a function: they are sent, and closed where it ran."""


def serve(path: str) -> None:
    import ctypes
    import importlib
    import traceback

    connection = socket.socket(fileno=0)
    driver = Driver(path)
    assert driver.cuInit(0) == 0
    assert driver.cuCtxSetCurrent(driver.make("cuDevicePrimaryCtxRetain", ctypes.c_void_p, 0)) == 0
    while True:
        text, files, _, _ = socket.recv_fds(connection, 1 << 16, _MOST_FILES)
        if not text:
            return
        module, name, arguments = pickle.loads(text)
        try:
            given = [*arguments, list(files)] if files else arguments
            result = getattr(importlib.import_module(module), name)(driver, *given)
            is_error = False
        except Exception:
            result, is_error = traceback.format_exc(), True
        sent = list(result) if isinstance(result, Files) else []
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", sent))] if sent else []
        connection.sendmsg([pickle.dumps((is_error, None if sent else result))], ancillary)
        for file in sent:
            os.close(file)
