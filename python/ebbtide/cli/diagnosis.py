"""The findings that `ebbtide doctor` shows: software, driver, devices, host memory and settings of this machine.

The look starts the driver and changes nothing else. Anything that is missing or broken becomes a finding, never an
exception.
"""

import importlib.util
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from ebbtide import driver_choice, settings
from ebbtide.errors import Error, StateError, neutral
from ebbtide.launch import preloading, site_files
from ebbtide.launch.programs import preload_obstacle
from ebbtide.sizes import format_size
from ebbtide.torch_extension import build
from ebbtide.torch_support import versions
from ebbtide.torch_support.allocator_settings import switched_on_by

Status = Literal["ok", "note", "problem"]

PACKAGES = ("torch", "numpy", "click", "rich")
_KERNEL_DRIVER = Path("/proc/driver/nvidia/version")
# Nothing can be paused without this one. The others are optional.
_REQUIRED_CAPABILITIES = ("vmm",)
_DEFAULT = " (default)"


@dataclass(frozen=True)
class Finding:
    """One row.

    Attributes:
        section: "software", "driver", "device 0", "torch extension", "host memory", "preloading", "compatibility" or
            "settings".
        found: its state.
        status: "problem" where regions cannot work before it is solved.
        advice: what to do about it, or "".
    """

    section: str
    name: str
    found: str
    status: Status = "ok"
    advice: str = ""

    @property
    def is_default(self) -> bool:
        """Whether it is a setting that nothing sets, and nothing is wrong with it."""
        return self.section == "settings" and self.status == "ok" and self.found.endswith(_DEFAULT)


def diagnose() -> list[Finding]:
    """All findings, in the order of the sections."""
    in_force = list(_guarded("settings", _settings))  # first, so that a malformed setting is reported here
    outcome, findings = _look_at_driver()
    findings = [*_software(), *findings]
    if outcome.driver not in (None, "off"):
        findings += _guarded("device", _devices)
        if outcome.driver != "sim":
            findings += _guarded("driver", _torch_allocator)
        else:
            findings += _guarded("torch extension", _torch_extension)
        findings += _guarded("host memory", _host_memory)
    findings += _guarded("preloading", _preloading)
    return [*findings, *_guarded("compatibility", _compatibility), *in_force]


def is_usable(findings: list[Finding]) -> bool:
    """Whether regions, pause and resume work here (or are switched off on purpose)."""
    return all(finding.status != "problem" for finding in findings)


def _guarded(section: str, look: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from look()
    except Exception as error:
        yield Finding(section, type(error).__name__, str(error), "problem")


def _refused(section: str, name: str, error: Error, status: Status) -> Finding:
    found, _, advice = neutral(error).partition(": ")  # for a reader who may write no Python
    return Finding(section, name, found, status, advice)


def _software() -> Iterator[Finding]:
    try:
        from ebbtide import _core

        yield Finding("software", "ebbtide", f"{_core.__version__}, {_core.loaded_library()}")
    except ImportError as error:
        yield Finding("software", "ebbtide", f"its library does not load: {error}", "problem", "install ebbtide again")
    sentence = versions.untried(python=sys.version_info[:2])
    yield Finding("software", "Python", platform.python_version(), "note" if sentence else "ok", sentence)
    yield Finding("software", "system", f"{platform.system()} {platform.release()}, {platform.machine()}")
    for package in PACKAGES:
        try:
            yield _package(package, metadata.version(package))
        except metadata.PackageNotFoundError:
            yield Finding("software", package, "not installed", "note")


def _package(package: str, version: str) -> Finding:
    problem, sentence = "", ""
    if package == "torch":
        try:
            numbers = versions.torch_version(version)
            problem, sentence = versions.torch_problem(numbers), versions.untried(torch=numbers)
        except StateError as error:
            problem = str(error)
    status: Status = "problem" if problem else "note" if sentence else "ok"
    return Finding("software", package, version, status, problem or sentence)


def _look_at_driver() -> tuple[driver_choice.Outcome, list[Finding]]:
    """Which driver regions would use, as the first region decides it."""
    try:
        outcome = driver_choice.decide_here()
    except ValueError:  # of EBBTIDE_DRIVER, among the settings
        return driver_choice.Outcome(None), [_kernel_driver()]
    except (ImportError, OSError) as error:
        return driver_choice.Outcome(None), [_kernel_driver(), Finding("driver", "choice", str(error), "problem")]
    if driver_choice.speaks_hip(outcome.driver, os.environ) or driver_choice.would_be_hip(os.environ):
        advice = "AMD: through the simulated driver only, never tried on hardware"
        findings = [Finding("driver", "names of functions", "HIP's", "note", advice)]
    else:
        findings = [_kernel_driver(), Finding("driver", "names of functions", "CUDA's")]
    if outcome.driver is None:
        findings.append(Finding("driver", "choice", outcome.found, "problem", outcome.advice))
    elif outcome.driver == "off":
        findings.append(Finding("driver", "choice", "off: every call is a no-op", "note"))
    else:
        findings.append(Finding("driver", "choice", outcome.line or outcome.driver))
    return outcome, findings


def _kernel_driver() -> Finding:
    try:
        text = _KERNEL_DRIVER.read_text().splitlines()[0].removeprefix("NVRM version:")
    except (OSError, IndexError):
        return Finding("driver", "NVIDIA kernel module", "none", "note")
    return Finding("driver", "NVIDIA kernel module", " ".join(text.split()))


def _devices() -> Iterator[Finding]:
    from ebbtide import _core

    for device in range(_core.device_count()):
        section = f"device {device}"
        info = _core.query_device(device)
        major, minor = divmod(info.compute_capability, 10)
        kind = f", compute capability {major}.{minor}" if info.compute_capability else ""
        yield Finding(section, "name", info.name + kind)
        sizes = f"{format_size(info.free_bytes)} free of {format_size(info.total_bytes)}"
        limit = "" if info.limit_bytes >= _core.UNLIMITED else f", device_limit {format_size(info.limit_bytes)}"
        yield Finding(section, "memory", f"{sizes}, granularity {format_size(info.granularity_bytes)}{limit}")
        for name, is_available, capability, advice in _core.capabilities(device):
            is_required = name in _REQUIRED_CAPABILITIES
            status: Status = "ok" if is_available else "problem" if is_required else "note"
            yield Finding(section, name, capability, status, advice)


def _torch_allocator() -> Iterator[Finding]:
    import torch

    found = torch.cuda.get_allocator_backend()
    variable = switched_on_by(os.environ, versions.torch_version(torch.__version__))
    if variable:
        advice = "the first region switches expandable segments off, which this torch can't combine with regions"
        yield Finding("driver", "torch's allocator", f"{found}, {variable}={os.environ[variable]}", "note", advice)
    else:
        yield Finding("driver", "torch's allocator", found)


def _torch_extension() -> Iterator[Finding]:
    """`_torch` serves CPU tensors, so only the simulated device needs it."""
    recipe = build.Recipe.of_this_process()
    for folder in (recipe.folder_in_package(), recipe.folder()):
        if (folder / "_torch.so").is_file():
            yield Finding("torch extension", "built", str(folder))
            return
    try:
        compiler = build.prepare(recipe)[0]
    except StateError as error:
        yield _refused("torch extension", "compiler", error, "problem")
    else:
        yield Finding("torch extension", "compiler", f"{compiler}, will build it at first need in {recipe.folder()}")


def _host_memory() -> Iterator[Finding]:
    from ebbtide import _core

    available, limit = _core.stats()["host_available_bytes"], _core.get_setting("host_limit")
    rest = f"host_limit {format_size(int(limit))}" if limit else "no host_limit"
    margin = format_size(int(_core.get_setting("host_margin")))
    advice = "" if available else "nothing with a backup can be paused: free host memory, or lower EBBTIDE_HOST_MARGIN"
    found = f"{format_size(available)} ({rest}, {margin} left to others)"
    yield Finding("host memory", "room for backups", found, "ok" if available else "note", advice)
    names = (settings.find("disk_directory").variable, "TMPDIR")
    folders = (os.fsdecode(_core.get_setting("disk_directory")), *map(os.environ.get, names), "/var/tmp")
    folder = Path(next(filter(None, folders))).absolute()
    try:
        _core.check_setting("disk_directory", os.fsencode(folder))
    except Error as error:  # a note: if no folder was chosen, only disk backups would miss it
        yield _refused("host memory", "disk backups", error, "note")
    else:
        free = format_size(shutil.disk_usage(folder).free)
        yield Finding("host memory", "disk backups", f"{folder} ({free} free)")


def _preloading() -> Iterator[Finding]:
    """The needs of `ebbtide run`; regions work without it."""
    from ebbtide import _core

    try:
        library = preloading.find_library()
    except StateError as error:
        yield _refused("preloading", "library", error, "note")
        return
    yield Finding("preloading", "library", str(library))
    obstacle = preload_obstacle(Path(sys.executable), library)
    if obstacle:
        yield Finding("preloading", "this Python", obstacle, "note", "`ebbtide run` needs a Python without that")
    named = re.split(r"[ :]+", os.environ.get(preloading.LOADER_VARIABLE, ""))
    if preloading.is_preload_library(_core.loaded_library()):
        is_active = settings.read_or_fallback("driver", os.environ) not in ("sim", "off")
        yield Finding("preloading", "this process", "preloaded" if is_active else "preloaded, and not active")
    elif any(map(preloading.is_preload_library, named)):
        yield Finding("preloading", "this process", "LD_PRELOAD names a library, and it was not loaded", "note")
    else:
        yield Finding("preloading", "this process", "not preloaded: `ebbtide run -- COMMAND` does that")


def _compatibility() -> Iterator[Finding]:
    """Which torch_memory_saver a program would get that is started as this one was."""
    name = "torch_memory_saver"
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        yield Finding("compatibility", name, "none: `ebbtide run --compat tms` gives ebbtide's")
    elif preloading.compat_path() in Path(found.origin).parents:
        yield Finding("compatibility", name, f"ebbtide's, {found.origin}")
    else:
        advice = "`ebbtide run --compat tms`, EBBTIDE_COMPAT=tms for SGLang, or install() give ebbtide's"
        yield Finding("compatibility", name, f"another one, {found.origin}", "ok", advice)
    known = site_files.installed()
    if known is not None and known[1]:
        yield Finding("compatibility", "pip", f"takes ebbtide's module for torch_memory_saver {known[0]}")
    path = site_files.site() / site_files.STARTUP_FILE
    try:
        is_ours = path.read_text() == site_files.startup_line()
    except OSError:
        return
    except ValueError:  # no text
        is_ours = False
    if is_ours:
        yield Finding("compatibility", "start-up file", f"{path}: EBBTIDE_COMPAT=tms gives ebbtide's")
    else:
        advice = "`ebbtide compat install tms` writes it again"
        yield Finding("compatibility", "start-up file", f"{path} is another ebbtide's", "note", advice)


def _settings() -> Iterator[Finding]:
    known = {setting.variable for setting in settings.all_settings()}
    problems = settings.problems()
    for setting in settings.all_settings():
        value = os.environ.get(setting.variable)
        if setting.name in problems:
            advice = f"correct {setting.variable}, or unset it"
            yield Finding("settings", setting.variable, problems[setting.name], "problem", advice)
        else:
            yield Finding("settings", setting.variable, value or f"{setting.fallback}{_DEFAULT}")
    for name in sorted(set(os.environ) - known):
        if name.startswith("EBBTIDE_"):
            yield Finding("settings", name, os.environ[name], "note", "ebbtide reads no such variable: is it misspelt?")
