"""A Python environment of its own, with what this one has."""

import os
import subprocess
import sys
import venv
from pathlib import Path


class OtherEnvironment:
    """A virtual environment whose packages are this process's, besides its own.

    Attributes:
        python: its interpreter.
        packages: its own site-packages.
    """

    def __init__(self, folder: Path) -> None:
        venv.EnvBuilder(with_pip=False, symlinks=True).create(folder)
        self.python = str(folder / "bin" / "python")
        (self.packages,) = folder.glob("lib/python*/site-packages")
        (self.packages / "those_of_the_tests.pth").write_text("\n".join(filter(None, sys.path)))

    def run(self, *arguments: str, **variables: str) -> str:
        """What its Python prints. Fails where it fails."""
        done = subprocess.run(
            [self.python, *arguments],
            env={**os.environ, **variables}, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def ebbtide(self, *arguments: str) -> str:
        """The output of the command."""
        return self.run("-m", "ebbtide.cli", *arguments)

    def add_wheel(self) -> None:
        """Another torch_memory_saver, as a wheel would bring it."""
        (self.packages / "torch_memory_saver").mkdir()
        (self.packages / "torch_memory_saver" / "__init__.py").write_text("torch_memory_saver = None\n")
