"""Runs programs in their own processes without importing torch again, which takes two seconds."""

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

# A process that has imported torch but not ebbtide. It forks for each program. The child runs the program at the end of
# the script, so that it ends as any Python program does; but what torch's libraries do last, after ebbtide's, takes
# longer than most programs and is left out unless the end is what a test is about.
SCRIPT = """
import ctypes, gc, importlib, json, os, select, sys
libc = ctypes.CDLL(None)
for name in sys.argv[1:]:
    importlib.import_module(name)
del sys.argv[1:]
gc.freeze()  # the end of each child would visit everything
print("ready", flush=True)
program = ""
for line in sys.stdin:
    request = json.loads(line)
    pid = os.fork()
    if pid == 0:
        program = request["program"]
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        if not request["whole_exit"]:
            libc.on_exit(libc._exit, None)
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            os.dup2(os.open(request[name], os.O_RDWR | os.O_CREAT), number)
        break
    pidfd = os.pidfd_open(pid)
    if not select.select([pidfd], [], [], request["timeout"])[0]:
        os.kill(pid, 9)
    os.close(pidfd)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
exec(compile(program, "<program>", "exec"))
"""


class ForkServer:
    """Runs each program in a fork of a process that has imported some modules and nothing else."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self._process = process
        self._folder = folder

    def run(
        self,
        program: str,
        timeout: float = 120,
        environment: Mapping[str, str] | None = None,
        whole_exit: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a program to its end. `environment` is its whole environment, by default that of this process.
        `whole_exit`: with the last of torch's libraries' own work."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        out, err = self._folder / "stdout", self._folder / "stderr"
        out.write_text("")
        err.write_text("")
        request = {
            "program": textwrap.dedent(program),
            "timeout": timeout,
            "whole_exit": whole_exit,
            "folder": str(Path.cwd()),
            "environment": dict(os.environ if environment is None else environment),
            "stdin": os.devnull,
            "stdout": str(out),
            "stderr": str(err),
        }
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        status = int(process.stdout.readline())
        return subprocess.CompletedProcess(program, status, out.read_text(), err.read_text())


@contextmanager
def open_fork_server(folder: Path, *modules: str) -> Iterator[ForkServer]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", SCRIPT, *modules], **pipes) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == "ready\n"
        yield ForkServer(process, folder)
        process.stdin.close()
