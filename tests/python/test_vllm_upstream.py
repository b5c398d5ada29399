"""vLLM's own tests of its allocator, unmodified, on the stub: those of the file that EBBTIDE_VLLM_TESTS names.

That is vLLM's test_cumem.py, which newer releases call otherwise. Each test runs in its own process. Tests that load a
model are left out. With EBBTIDE_VLLM_SOURCES, also vLLM's own modules around the allocator.
tests/tooling/test_vllm_upstream_planted.py tests this file.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from vllm_signatures import RELEASES  # noqa: E402

HERE = Path(__file__).parent
# These run on the simulated device as well. The others capture graphs, or fill the GPU from outside of the pools.
ANYWHERE = ("test_basic_cumem", "test_discard_tags", "test_selective_wake_restores_internal_tags", "test_reentered_tag")
ON_A_GPU = ("test_python_error", "test_cumem_with_cudagraph", "test_runtime_state_survives_sleep")
# Its private parts are what a test is about, and ebbtide's allocator has others.
OF_VLLMS_INSIDE = {"test_basic_cumem": "sync_devices"}

CONFTEST = """
import sys
import vllm_stub
vllm_stub.install_for_upstream_tests({device!r})
"""
UTILS = """
def create_new_process_for_each_test(method=None):
    return lambda function: function
def requires_fp8(function):
    return function
"""


def lay_out(source: Path, folder: Path, device: str) -> Path:
    """Puts the file as deep into a package `tests` as its relative imports say; returns its place."""
    text = source.read_text()
    depth = max((len(dots) for dots in re.findall(r"^from (\.+)utils import", text, re.MULTILINE)), default=1)
    package = folder / "tests"
    place = package.joinpath(*[f"level{number}" for number in range(1, depth)])
    place.mkdir(parents=True)
    for each in [place, *place.parents]:
        if package in (each, *each.parents):
            (each / "__init__.py").write_text("")
    (package / "utils.py").write_text(UTILS)
    (folder / "conftest.py").write_text(CONFTEST.format(device=device))
    copy = place / source.name
    copy.write_text(text)
    return copy


@pytest.mark.device_memory
@pytest.mark.expected_skip("EBBTIDE_VLLM_TESTS names a file of vLLM's, in which not every release has every test")
@pytest.mark.parametrize("name", [*ANYWHERE, *ON_A_GPU])
def test_of_vllm(name: str, driver_name: str, tmp_path: Path) -> None:
    source = Path(os.environ.get("EBBTIDE_VLLM_TESTS", ""))
    if not source.is_file():
        pytest.skip("EBBTIDE_VLLM_TESTS is not set")
    if f"def {name}(" not in source.read_text():
        pytest.skip("this release has no such test")
    if driver_name == "sim" and name in ON_A_GPU:
        pytest.skip("needs a GPU")
    if OF_VLLMS_INSIDE.get(name, name * 2) in source.read_text():
        pytest.skip("asserts which functions of torch vLLM's allocator calls")
    copy = lay_out(source, tmp_path, "cpu" if driver_name == "sim" else "cuda")
    paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}

    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    cases = re.findall(r"^\S+::(\S+)$", run("--collect-only", "-k", name, str(copy)), re.MULTILINE)
    assert cases
    for case in cases:
        assert "1 passed" in run(f"{copy}::{case}")


@pytest.mark.expected_skip("EBBTIDE_VLLM_SOURCES is a folder of vLLM's sources, one folder for each release")
@pytest.mark.parametrize("release", RELEASES)
def test_vllms_own_factory_and_backends_run_on_ebbtide(release: str) -> None:
    sources = Path(os.environ.get("EBBTIDE_VLLM_SOURCES", ""), release)
    if not (sources / "vllm").is_dir():
        pytest.skip("no sources of this release")
    command = [sys.executable, str(HERE / "vllm_around_sources.py"), str(sources)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["ok"]), done.stdout + done.stderr
