"""Which driver this process works with: `EBBTIDE_DRIVER`, the torch that is there and the driver that is there
decide, once, at first need.

| EBBTIDE_DRIVER | torch is a CPU build | torch has CUDA           | no torch               |
|----------------|----------------------|--------------------------|------------------------|
| auto (default) | sim, with one line   | cuda, or an error        | cuda, or an error      |
| cuda           | refused on tensors   | cuda, or an error        | cuda, or an error      |
| sim            | sim                  | sim, for CPU tensors     | sim                    |
| off            | off                  | off                      | off                    |

A torch with CUDA and no working driver is an error that names EBBTIDE_DRIVER=sim, never a silent simulation. With
that setting the simulated device serves every build of torch, one for ROCm too: regions then cover CPU tensors, and
torch's own devices are left alone. Importing torch is left to the caller: only regions need it.

Under `ebbtide run --simulate` libcuda.so.1 is the simulated driver. Regions then use it as with EBBTIDE_DRIVER=sim,
except that a torch with CUDA is refused.
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

from ebbtide import settings
from ebbtide.errors import Error, StateError
from ebbtide.locks import make_lock
from ebbtide.stderr import say

Setting = Literal["auto", "cuda", "sim", "off"]
TorchKind = Literal["none", "cpu", "cuda", "rocm"]
Driver = Literal["cuda", "sim", "off"]

SETTINGS: tuple[Setting, ...] = get_args(Setting)
VARIABLE = "EBBTIDE_DRIVER"
LIBRARY_PATH_VARIABLE = "LD_LIBRARY_PATH"
# The driver's problem under `ebbtide run --simulate`.
SIMULATED = "it is the simulated one of `ebbtide run --simulate`"


@dataclass(frozen=True)
class Outcome:
    """A driver, or None where it is refused. `line` is the sentence that says so, "" for nothing to say."""

    driver: Driver | None
    line: str = ""

    def problem_and_advice(self) -> tuple[str, str]:
        """A refusal's two parts: what is wrong, whose last words may be another library's in brackets, and what to do
        about it."""
        bracket = self.line.find("): ")
        end = bracket + 1 if bracket >= 0 else self.line.find(": ")
        return self.line[:end], self.line[end + 2 :]


def parse_setting(text: str | None) -> Setting:
    """The value of EBBTIDE_DRIVER; unset and empty mean auto.

    Raises:
        ValueError: any other value.
    """
    return cast(Setting, settings.read("driver", {VARIABLE: text or ""}) or "auto")


def needs_probe(setting: Setting, torch_kind: TorchKind, on_tensors: bool) -> bool:
    """Whether `decide` looks at `driver_problem`: probing a driver fixes the choice, so ask only where it matters."""
    return decide(setting, torch_kind, None, on_tensors).driver == "cuda"


def decide(setting: Setting, torch_kind: TorchKind, driver_problem: str | None, on_tensors: bool = True) -> Outcome:
    """The whole decision, from plain values.

    Args:
        setting: what EBBTIDE_DRIVER says.
        torch_kind: the torch that is installed.
        driver_problem: why the CUDA driver does not work, or None where it does.
        on_tensors: whether torch's tensors are to live in ebbtide's memory (regions), or only memory that torch does
            not know of.
    """
    if setting == "off":
        return Outcome("off")
    if on_tensors:
        refusal = _refuse_tensors(setting, torch_kind)
        if refusal:
            return Outcome(None, refusal)
    if setting == "sim":
        return Outcome("sim")
    if setting == "auto" and torch_kind == "cpu":
        return Outcome(
            "sim",
            f"torch is a CPU build: using the simulated device ({VARIABLE}=sim says so and drops this line)",
        )
    if driver_problem is None:
        return Outcome("cuda")
    return Outcome(None, _explain_driver(torch_kind, driver_problem))


def _refuse_tensors(setting: Setting, torch_kind: TorchKind) -> str:
    if torch_kind == "none":
        return "regions need PyTorch 2.6 or newer: install torch"
    if torch_kind == "rocm" and setting != "sim":
        return (
            "this torch is built for ROCm, and ebbtide works with NVIDIA GPUs: install a CUDA build of torch, "
            f"set {VARIABLE}=sim to try ebbtide with CPU tensors on the simulated device, or set {VARIABLE}=off"
        )
    if setting == "cuda" and torch_kind == "cpu":
        return (
            f"{VARIABLE}=cuda, but torch is a CPU build: "
            f"install torch with CUDA, or set {VARIABLE}=sim for the simulated device"
        )
    return ""


def _explain_driver(torch_kind: TorchKind, driver_problem: str) -> str:
    if driver_problem == SIMULATED:
        return (
            "torch is built with CUDA, whose kernels do not run on the simulated device of `ebbtide run --simulate`: "
            f"leave --simulate out, and where there is no GPU set {VARIABLE}=sim to try ebbtide with CPU tensors"
        )
    what = "there is no working NVIDIA driver"
    if torch_kind == "cuda":
        what = f"torch is built with CUDA, but {what}"
    return (
        f"{what} ({driver_problem}): run where there is a GPU, set {VARIABLE}=sim to try ebbtide with CPU tensors on "
        f"the simulated device, or set {VARIABLE}=off to run without ebbtide"
    )


def installed_torch_kind() -> TorchKind:
    """What kind of torch `import torch` gives here; imports it."""
    try:
        import torch
    except ImportError as error:
        if (error.name or "").partition(".")[0] == "torch" and sys.modules.get("torch") is None:
            return "none"
        raise
    if torch.version.cuda is not None:
        return "cuda"
    return "rocm" if getattr(torch.version, "hip", None) is not None else "cpu"


def torch_on_gpu() -> Any:
    """torch, where it has begun to use the GPUs that regions cover; None elsewhere, as beside a simulated device, which
    has no part in torch's GPUs."""
    torch = sys.modules.get("torch")
    is_cuda = torch is not None and torch.version.cuda is not None and _chosen != "sim"
    return torch if torch is not None and is_cuda and torch.cuda.is_initialized() else None


def simulated_folder() -> Path:
    """The folder with the simulated driver as libcuda.so.1, for LD_LIBRARY_PATH; whether or not it is there."""
    return Path(__file__).resolve().parent / "simulated"


def is_simulated_run(environment: Mapping[str, str]) -> bool:
    """Whether a process with this environment is one of `ebbtide run --simulate`."""
    return str(simulated_folder()) in environment.get(LIBRARY_PATH_VARIABLE, "").split(os.pathsep)


def find_driver_problem() -> str | None:
    """Why torch can't use the CUDA driver here; None where it can. Fixes this process's driver to "cuda"."""
    from ebbtide import _core

    try:
        _core.use_driver("cuda")
        if _core.device_count() > 0:
            return SIMULATED if is_simulated_run(os.environ) else None
    except Error as error:
        return str(error).partition(". ")[0]  # what is wrong; what to do about it depends on torch as well
    return "it shows no GPU"


def is_off() -> bool:
    """Whether EBBTIDE_DRIVER=off: every call is then a no-op that returns empty reports."""
    if _chosen is not None:
        return _chosen == "off"
    return parse_setting(os.environ.get(VARIABLE)) == "off"


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
            if outcome.line and not is_simulated_run(os.environ):  # who asks for it there need not be told
                say(outcome.line)
        return _chosen


def decide_here() -> Outcome:
    """The decision for regions in this process, which fixes the core's device. Imports torch unless off.

    Raises:
        ValueError: EBBTIDE_DRIVER has an unknown value.
    """
    setting = parse_setting(os.environ.get(VARIABLE))
    if setting == "off":
        return Outcome("off")
    torch_kind = installed_torch_kind()
    problem = find_driver_problem() if needs_probe(setting, torch_kind, on_tensors=True) else None
    outcome = decide(setting, torch_kind, problem)
    if outcome.driver == "sim":
        _use_simulated_device(setting)
    return outcome


def _use_simulated_device(setting: Setting) -> None:
    """Makes it the core's device. In a simulated run it is the CUDA driver, before which the preload library stands."""
    from ebbtide import _core

    _core.use_driver("cuda" if setting == "auto" and _is_driver_simulated() else "sim")


def _is_driver_simulated() -> bool:
    """Whether the CUDA driver is the simulated one in this process, and not only in those that it starts."""
    from ebbtide import _core

    return is_simulated_run(os.environ) and _core.is_simulated()
