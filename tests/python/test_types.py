"""Programs that use ebbtide under a type checker: right ones pass, and slips are found."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.sim_only  # no program runs

RIGHT = """
import ebbtide
from ebbtide import lms, saver

with saver.region("weights", backup="pinned", retain=True) as region:
    print(region.tag, saver.device.upper(), len(saver.timeline), ebbtide.__version__)
report = saver.pause("weights", ["kv_cache", "graphs"], missing_ok=True)
print(report.bytes + saver.pause({"weights": "ram", "kv_cache": None}).copied)
pending = saver.resume("weights", wait=False)
print(pending.wait().bytes, saver.resume().seconds, saver.swap(pause={"a", "b"}, resume=("c",)).paused.bytes)
with saver.paused({"weights": "disk"}) as moved:
    print(moved.bytes)
with lms.enable(limit="1GiB"):
    lms.limit = "2GiB"
for row in saver.outside(report):
    print(row.name, len(saver.outside(report)))
"""
# A line and the checker's message about it.
SLIPS = {
    'saver.pause({"weights": "dsk"})': "Dict entry 0 has incompatible type",
    'saver.pause("weights", backup="dsk")': "No overload variant",
    'saver.puase("weights")': 'has no attribute "puase"',
    "saver.timelime": 'has no attribute "timelime"',
    "ebbtide.enabel(3)": 'has no attribute "enabel"',
    "ebbtide.OutOfMemoryErorr": 'has no attribute "OutOfMemoryErorr"',
    "ebbtide.lms.limt = 3": 'has no attribute "limt"',
    'saver.paused("weights").__enter__().nothing': 'has no attribute "nothing"',
    "saver.pause(3)": "No overload variant",
    'saver.region("weights", threads="al")': "incompatible type",
}


def check(program: str, folder: Path) -> str:
    pytest.importorskip("mypy")
    (folder / "program.py").write_text(program)
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--cache-dir", str(folder / "cache")]
    return subprocess.run([*command, "program.py"], cwd=folder, capture_output=True, text=True, check=False).stdout


def test_right_programs_pass_and_slips_are_found(tmp_path: Path) -> None:
    """In one program, because mypy takes seconds to start."""
    lines = RIGHT.splitlines()
    said = check("\n".join([*lines, *SLIPS]) + "\n", tmp_path)
    found: dict[int, list[str]] = {}
    for number, error in re.findall(r"^program\.py:(\d+): error: (.*)$", said, re.MULTILINE):
        found.setdefault(int(number) - len(lines) - 1, []).append(error)
    assert found.keys() == set(range(len(SLIPS))), said
    for number, complaint in enumerate(SLIPS.values()):
        assert any(complaint in each for each in found[number]), said
