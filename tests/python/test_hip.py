"""A driver by HIP's names."""

import shutil
import sys
from pathlib import Path

import ebbtide
import pytest
from ebbtide import driver_choice

pytestmark = pytest.mark.sim_only  # it stands for an AMD GPU
BY_HIPS_NAMES = {"EBBTIDE_DRIVER": "sim", "EBBTIDE_SIM_HIP": "1"}

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
