"""Programs of programs/ that stay and answer requests: several of them can take turns."""

import contextlib
import json
import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.unmodified import LAST_WORDS, ROOT, ProgramError, command_of, die_with_parent, environment

STOP_SECONDS = 30


class Answering:
    """One such process (`common.serve` is its side).

    Args:
        program, options, arguments: as `unmodified.start` has them. Returns at once: several start beside each other.
    """

    def __init__(self, program: str, options: Mapping[str, object] | None, **arguments: Any) -> None:
        self._program = program
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `stop`)
        self._process = subprocess.Popen(
            command_of(program, options, arguments),
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            preexec_fn=die_with_parent,  # noqa: PLW1509 (a part has one thread)
        )

    def read(self) -> dict[str, Any]:
        """Its next answer. The first is that it is ready.

        Raises:
            ProgramError: it ended.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._error(self._process.wait(STOP_SECONDS))
        return dict(json.loads(line))

    def ask(self, word: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `read` says how it ended
            self._process.stdin.write(f"{word}\n")
            self._process.stdin.flush()
        return self.read()

    def pin(self, cores: set[int]) -> None:
        """Binds all threads that it has by now to these cores; those that they make are bound with them."""
        for thread in Path(f"/proc/{self._process.pid}/task").iterdir():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread.name), cores)

    def stop(self) -> None:
        """Lets it end by itself.

        Raises:
            ProgramError: it ended badly.
        """
        try:
            self._process.communicate(timeout=STOP_SECONDS)
            if self._process.returncode != 0:
                raise self._error(self._process.returncode)
        finally:
            self._process.kill()
            self._process.wait()
            self._log.close()

    def _error(self, status: int) -> ProgramError:
        self._log.seek(0)
        last_words = self._log.read().decode(errors="replace").strip()[-LAST_WORDS:]
        return ProgramError(f"{self._program} ended with status {status}: {last_words}")
