"""Which driver this process works with. EBBTIDE_DRIVER, the installed torch and the installed driver decide, once, at
first need.

| EBBTIDE_DRIVER | torch is a CPU build | torch has CUDA           | torch has ROCm      | no torch |
|----------------|----------------------|--------------------------|---------------------|----------|
| auto (default) | sim, with one line   | cuda, or an error        | hip, with one line  | an error |
| cuda           | an error             | cuda, or an error        | an error            | an error |
| hip            | an error             | an error                 | hip, or an error    | an error |
| sim            | sim                  | sim, for CPU tensors     | sim, for CPU tensors| an error |
| off            | off                  | off                      | off                 | off      |

A torch for GPUs and no working driver is an error that names EBBTIDE_DRIVER=sim, never a silent simulation. With that
setting, regions cover CPU tensors, and torch's own devices are left alone.
"""

import importlib.util
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from ebbtide import settings
from ebbtide.errors import Error, StateError
from ebbtide.locks import make_lock
from ebbtide.stderr import say

Setting = Literal["auto", "cuda", "hip", "sim", "off"]
TorchKind = Literal["none", "cpu", "cuda", "rocm"]
GpuDriver = Literal["cuda", "hip"]
Driver = Literal["cuda", "hip", "sim", "off"]

VARIABLE = "EBBTIDE_DRIVER"


@dataclass(frozen=True)
class Outcome:
    """A driver, or None where regions are refused.

    Attributes:
        found: why, in a sentence; "" where there is nothing to say.
        advice: what to do about a refusal.
    """

    driver: Driver | None
    found: str = ""
    advice: str = ""

    @property
    def line(self) -> str:
        """Both."""
        return f"{self.found}: {self.advice}" if self.advice else self.found


def read_setting() -> Setting:
    """The value of EBBTIDE_DRIVER; unset and empty mean auto.

    Raises:
        ValueError: any other value.
    """
    return cast(Setting, settings.read("driver", os.environ) or "auto")


_BUILDS: dict[TorchKind, str] = {"cpu": "a CPU build", "cuda": "built with CUDA", "rocm": "built with ROCm"}
_GPU_DRIVERS: dict[TorchKind, GpuDriver] = {"cuda": "cuda", "rocm": "hip"}
_NAMES: dict[GpuDriver, tuple[str, str]] = {"cuda": ("CUDA", "NVIDIA driver"), "hip": ("ROCm", "HIP")}


def decide(setting: Setting, torch_kind: TorchKind, find_driver_problem: Callable[[GpuDriver], str | None]) -> Outcome:
    """The whole decision.

    Args:
        setting: the value of EBBTIDE_DRIVER.
        torch_kind: the torch that is installed.
        find_driver_problem: says why a driver does not work, or None where it does. It is called only where that
            matters, since a probe of the driver fixes the choice.
    """
    if setting == "off":
        return Outcome("off")
    if torch_kind == "none":
        return Outcome(None, "regions need PyTorch 2.6 or newer", "install torch")
    if setting == "sim":
        return Outcome("sim")
    if torch_kind == "cpu" and setting == "auto":
        return Outcome(
            "sim", f"torch is a CPU build: using the simulated device ({VARIABLE}=sim says so and drops this line)"
        )
    driver = _GPU_DRIVERS.get(torch_kind)
    if driver is None or (setting != "auto" and setting != driver):
        wanted = _NAMES[cast(GpuDriver, setting)][0]
        return Outcome(
            None,
            f"{VARIABLE}={setting}, but torch is {_BUILDS[torch_kind]}",
            f"install torch with {wanted}, or set {VARIABLE}=sim for the simulated device",
        )
    problem = find_driver_problem(driver)
    if problem is None and driver == "hip" and setting == "auto":
        return Outcome(
            "hip", f"torch is built with ROCm: using HIP, which is untried on AMD GPUs ({VARIABLE}=hip drops this line)"
        )
    if problem is None:
        return Outcome(driver)
    return Outcome(
        None,
        f"torch is {_BUILDS[torch_kind]}, but there is no working {_NAMES[driver][1]} ({problem})",
        f"run where there is a GPU, set {VARIABLE}=sim to try ebbtide with CPU tensors on the simulated device, or set "
        f"{VARIABLE}=off to run without ebbtide",
    )


def installed_torch_kind() -> TorchKind:
    """The kind of torch that `import torch` gives here; imports it."""
    try:
        import torch
    except ImportError as error:
        if (error.name or "").partition(".")[0] == "torch" and sys.modules.get("torch") is None:
            return "none"
        raise
    if torch.version.cuda is not None:
        return "cuda"
    return "rocm" if getattr(torch.version, "hip", None) is not None else "cpu"


def is_hip() -> bool:
    """Whether regions cover AMD GPUs, or the simulated device by HIP's names. False before the first region."""
    return speaks_hip(_chosen, os.environ)


def speaks_hip(driver: str | None, environment: Mapping[str, str]) -> bool:
    """Whether a driver is called by HIP's names."""
    return driver == "hip" or (driver == "sim" and settings.read_or_fallback("sim_hip", environment) == "1")


def would_be_hip(environment: Mapping[str, str]) -> bool:
    """The same of a program that is started in this environment and has this Python's torch, which is not imported."""
    setting = settings.read_or_fallback("driver", environment)
    return speaks_hip(setting, environment) or (setting == "auto" and _is_rocm_installed())


def _is_rocm_installed() -> bool:
    try:
        spec = importlib.util.find_spec("torch")
        text = "" if spec is None else Path(spec.origin or "").with_name("version.py").read_text()
    except (ImportError, OSError, ValueError):  # no torch that could tell
        return False
    return re.search(r"^hip\b[^=\n]*= *['\"]", text, re.MULTILINE) is not None


def torch_on_gpu() -> Any:
    """torch, if it has begun to use the GPUs that regions cover; else None, also beside the simulated device."""
    torch = sys.modules.get("torch")
    if torch is None or _chosen == "sim" or not (torch.version.cuda or getattr(torch.version, "hip", None)):
        return None
    return torch if torch.cuda.is_initialized() else None


def _find_driver_problem(driver: GpuDriver) -> str | None:
    """Why torch can't use this driver here; None where it can. Fixes this process's driver to it."""
    from ebbtide import _core

    try:
        _core.use_driver(driver)
        if _core.device_count() > 0:
            return None
    except Error as error:
        return str(error).partition(". ")[0]  # the problem; the advice depends on torch as well
    return "it shows no GPU"


def is_off() -> bool:
    """Whether EBBTIDE_DRIVER=off: every call is then a no-op that returns empty reports."""
    return (_chosen or read_setting()) == "off"


_lock = make_lock()
_chosen: Driver | None = None


def choose_for_tensors() -> Driver:
    """The driver for regions, decided at the first call, then the same for ever. Imports torch unless off.

    Raises:
        StateError: this torch and this driver do not go together; the sentence says what to do.
        ValueError: EBBTIDE_DRIVER has an unknown value.
    """
    global _chosen
    if _chosen is not None:
        return _chosen
    with _lock:
        if _chosen is None:
            outcome = decide_here()
            if outcome.driver is None:
                raise StateError(outcome.line)
            _chosen = outcome.driver
            if outcome.line:
                say(outcome.line)
        return _chosen


def decide_here() -> Outcome:
    """The decision for regions in this process, which fixes the core's device. Imports torch unless off.

    Raises:
        ValueError: EBBTIDE_DRIVER has an unknown value.
    """
    setting = read_setting()
    if setting == "off":
        return Outcome("off")
    outcome = decide(setting, installed_torch_kind(), _find_driver_problem)
    if outcome.driver == "sim":
        from ebbtide import _core

        _core.use_driver("sim")
    return outcome
