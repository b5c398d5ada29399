"""A driver by HIP's names: what works, and one sentence for each part that does not."""

import json
import shutil
import sys
from pathlib import Path

import ebbtide
import pytest
from ebbtide import driver_choice
from ebbtide.launch import preloading

pytestmark = pytest.mark.sim_only  # it stands for an AMD GPU
BY_HIPS_NAMES = {"EBBTIDE_DRIVER": "sim", "EBBTIDE_SIM_HIP": "1"}
RUN = "import sys; sys.argv[0] = 'ebbtide'; from ebbtide.cli import main; main(['run', *{arguments!r}])"

ROUND_TRIP = """
    import torch
    from ebbtide import _core, saver

    with saver.region("weights"):
        kept = torch.arange(1 << 20)
    address = kept.data_ptr()
    saver.pause("weights")
    saver.resume("weights")
    assert torch.equal(kept, torch.arange(1 << 20)) and kept.data_ptr() == address
    saver.adopt(torch.ones(9), tag="weights")
    print(next(found for name, _, found, _ in _core.capabilities(0) if name == "driver"))
"""


def test_a_region_leaves_and_comes_back(run_python):
    result = run_python(ROUND_TRIP, **BY_HIPS_NAMES)
    assert result.stdout == "HIP 7.1\n", result.stderr


REFUSALS = """
    import contextlib, functools, importlib
    import torch
    import ebbtide
    from ebbtide import saver
    from ebbtide.saver.pools import captures

    class Graph:
        def capture_begin(self, pool=None):
            raise SystemExit("the capture began")

        def capture_end(self):
            pass

    captures._wrap(Graph, lambda: None)
    with saver.region("a"):
        kept = torch.ones(9)

    def enter(scope):
        with scope:
            raise SystemExit("entered")

    calls = {
        "split": lambda: enter(saver.region("b", overflow="split")),
        "whole": lambda: enter(saver.region("b", overflow="whole")),
        "demote": lambda: saver.demote("a"),
        "host_pool": lambda: saver.configure(host_pool="64MiB"),
        "lms": lambda: ebbtide.lms.enable("1GiB"),
        "cuda_graph": lambda: enter(saver.cuda_graph(Graph())),
        "graph_pool": lambda: saver.graph_pool(),
        "torch.cuda.graph": lambda: Graph().capture_begin(),
        "env": lambda: ebbtide.env(overflow="split"),
    }
    for name, call in calls.items():
        try:
            call()
        except ebbtide.StateError as error:
            print(f"{name}: {error}")
    assert saver.tags()["a"].state == "resident" and float(kept.sum()) == 9
"""
OVERFLOW = "overflow to the host does not work with HIP: leave overflow, demote and host_pool out, or pause tags"
GRAPHS = "graph captures do not work with HIP once there are regions: run without graphs"


def test_each_part_that_does_not_work_is_refused_in_a_sentence(run_python):
    result = run_python(REFUSALS, **BY_HIPS_NAMES)
    assert result.returncode == 0, result.stderr
    said = dict(line.split(": ", 1) for line in result.stdout.splitlines())
    for name in ("split", "whole", "demote", "host_pool"):
        assert said.pop(name).startswith(OVERFLOW)
    for name in ("cuda_graph", "graph_pool", "torch.cuda.graph"):
        assert said.pop(name).startswith(GRAPHS)
    assert said.pop("lms").startswith("large model support does not work with HIP")
    assert said.pop("env").startswith("the preload library and large model support do not work with HIP")
    assert said == {}


@pytest.mark.parametrize("options", [[], ["--pauseable"], ["--lms", "1GiB"], ["--compat", "tms", "--lms", "1GiB"]])
def test_run_is_refused(run_python, options):
    result = run_python(RUN.format(arguments=[*options, "--", sys.executable, "-c", "print(1)"]), **BY_HIPS_NAMES)
    assert (result.returncode, result.stdout) == (1, "")
    assert "start the program without `ebbtide run`" in result.stderr


def test_run_gives_torch_memory_savers_module(run_python):
    program = "import os, torch_memory_saver; print(torch_memory_saver.__file__)"
    arguments = ["--compat", "tms", "--", sys.executable, "-c", program]
    result = run_python(RUN.format(arguments=arguments), **BY_HIPS_NAMES)
    assert "ebbtide/compat/tms" in result.stdout, result.stderr


def test_doctor_says_that_no_hardware_was_tried(run_python):
    program = "from ebbtide.cli import main; main(['doctor', '--json'])"
    found = {}
    for is_hip in "01":
        result = run_python(program, EBBTIDE_DRIVER="sim", EBBTIDE_SIM_HIP=is_hip)
        assert result.returncode == 0, result.stderr
        findings = json.loads(result.stdout)["findings"]
        found[is_hip] = {each["name"]: (each["found"], each["advice"]) for each in findings}
    names = "names of functions"
    assert found["0"][names] == ("CUDA's", "")
    assert found["1"][names] == ("HIP's", "AMD: through the simulated driver only, never tried on hardware")
    assert "NVIDIA kernel module" in found["0"] and "NVIDIA kernel module" not in found["1"]
    assert found["1"]["host_memory"] == ("not used with HIP: nothing overflows", "")


ROCM = """
    import ctypes
    import torch
    torch.version.cuda, torch.version.hip = None, "7.1.0"
    ctypes.CDLL({library!r})
    from ebbtide import _core, driver_choice
    print(driver_choice.choose_for_tensors(), _core.driver_name(), driver_choice.is_hip())
"""


@pytest.mark.parametrize("setting", [None, "hip"])
def test_torch_for_rocm_chooses_hip(run_python, tmp_path, setting):
    """The kind of torch is faked, and the simulator stands for HIP's library."""
    library = str(tmp_path / "libamdhip64.so.7")
    shutil.copy(Path(ebbtide.__file__).parent / "libebbtide_sim.so", library)
    result = run_python(ROCM.format(library=library), EBBTIDE_DRIVER=setting)
    assert result.stdout == "hip hip True\n", result.stderr
    assert result.stderr.count("using HIP, which is untried on AMD GPUs") == (setting is None)


@pytest.mark.parametrize(
    ("text", "is_rocm"), [("hip: Optional[str] = '7.1.2'", True), ("hip: Optional[str] = None", False), ("", False)]
)
def test_a_torch_for_rocm_is_known_before_its_import(tmp_path, monkeypatch, text, is_rocm):
    """`ebbtide run` imports no torch."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").touch()
    (tmp_path / "torch/version.py").write_text(f"cuda: Optional[str] = None\n{text}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert driver_choice.would_be_hip({}) is is_rocm
    assert driver_choice.would_be_hip({"EBBTIDE_DRIVER": "hip"})
    assert not driver_choice.would_be_hip({"EBBTIDE_DRIVER": "cuda"})
    assert preloading.settle_driver({}) == ({"EBBTIDE_DRIVER": "hip"} if is_rocm else {})
    assert preloading.settle_driver({"EBBTIDE_DRIVER": "sim", "EBBTIDE_SIM_HIP": "1"}) == {}
