"""program_sources.py: what it makes up, and what it leaves alone."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
SERVE = """
import os, sys
sys.path.append(os.environ["TESTS"])
import program_sources
"""


def test_made_up_modules_change_nothing_and_real_ones_run(tmp_path):
    """A fault in a real file is seen, and what other packages do without stays missing."""
    (tmp_path / "planted").mkdir()
    (tmp_path / "planted" / "real.py").write_text(
        "from missing_package import decorate, Base\nimport planted.other\n"
        "class Kind(Base, frozen=True):\n    @decorate\n    def value(self): return 7 if planted.other.flag else 8\n"
        "def fails(): raise ValueError('planted')\n"
    )
    code = SERVE + (
        "program_sources.serve('planted', os.environ['SOURCES'], real=['planted.real'])\n"
        "from planted.real import Kind, fails\n"
        "assert Kind(1, a=2).value() == 8\n"
        "try:\n    import missing_package_of_others\n    raise SystemExit('made up')\n"
        "except ImportError:\n    fails()\n"
    )
    variables = {"SOURCES": str(tmp_path), "TESTS": str(HERE)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stderr.endswith("ValueError: planted\n"), done.stderr
