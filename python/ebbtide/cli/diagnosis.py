"""What is here and whether ebbtide can work with it: the findings that `ebbtide doctor` shows.

Looking changes nothing but that it starts the driver. Whatever is missing or broken becomes a finding, never an
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
from ebbtide.launch import distribution, preloading, startup_file
from ebbtide.launch.programs import preload_obstacle
from ebbtide.sizes import format_size
from ebbtide.torch_extension import build
from ebbtide.torch_support import versions
from ebbtide.torch_support.allocator_settings import switched_on_by

Status = Literal["ok", "note", "problem"]

PACKAGES = ("torch", "numpy", "click", "rich")
_KERNEL_DRIVER = Path("/proc/driver/nvidia/version")
# Without this one nothing can be paused; what the others offer is optional.
_REQUIRED_CAPABILITIES = ("vmm",)
_DEFAULT = " (default)"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        section: "software", "driver", "device 0", "torch extension", "host memory", "preloading", "compatibility" or
            "settings".
        found: what is there.
        status: "problem" where regions cannot work before it is solved.
        advice: what to do about it; "" if nothing.
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
    if outcome.driver in ("cuda", "sim"):
        findings += _guarded("device", _devices)
        if outcome.driver == "cuda":
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
    if package == "torch":
        try:
            numbers = versions.torch_version(version)
        except StateError as error:
            return Finding("software", package, version, "problem", str(error))
        problem, sentence = versions.torch_problem(numbers), versions.untried(torch=numbers)
        if problem or sentence:
            return Finding("software", package, version, "problem" if problem else "note", problem or sentence)
    return Finding("software", package, version)


def _look_at_driver() -> tuple[driver_choice.Outcome, list[Finding]]:
    """Which driver regions would use, as the first region decides it."""
    findings = [_kernel_driver()]
    try:
        outcome = driver_choice.decide_here()
    except ValueError:  # of EBBTIDE_DRIVER, among the settings
        return driver_choice.Outcome(None), findings
    except (ImportError, OSError) as error:
        findings.append(Finding("driver", "choice", str(error), "problem"))
        return driver_choice.Outcome(None), findings
    if outcome.driver is None:
        problem, advice = outcome.problem_and_advice()
        findings.append(Finding("driver", "choice", problem, "problem", advice))
    elif outcome.driver == "off":
        findings.append(Finding("driver", "choice", "off: every call is a no-op", "note"))
    else:
        findings.append(Finding("driver", "choice", outcome.line or outcome.driver))
    return outcome, findings


def _kernel_driver() -> Finding:
    try:
        text = _KERNEL_DRIVER.read_text().splitlines()[0].removeprefix("NVRM version:").strip()
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
        for capability in _core.capabilities(device):
            is_required = capability.name in _REQUIRED_CAPABILITIES
            status: Status = "ok" if capability.available else "problem" if is_required else "note"
            yield Finding(section, capability.name, capability.found, status, capability.advice)


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
    folder = build.cache_folder() / "torch_extension" / recipe.key()
    if (folder / "_torch.so").is_file():
        yield Finding("torch extension", "built", str(folder))
        return
    if problem := build.find_cache_problem():
        found, _, advice = problem.rpartition(": ")
        yield Finding("torch extension", "folder", found, "problem", advice)
        return
    try:
        compiler = build.find_compiler()[0]
    except StateError as error:
        yield Finding("torch extension", "compiler", "none", "problem", str(error))
        return
    yield Finding("torch extension", "compiler", f"{compiler}, will build it at first need in {folder}")
    if not (recipe.python_include / "Python.h").is_file():
        advice = "install Python's development files (on Debian and Ubuntu: apt install python3-dev)"
        yield Finding("torch extension", "Python.h", f"not in {recipe.python_include}", "problem", advice)


def _host_memory() -> Iterator[Finding]:
    from ebbtide import _core

    available, limit = _core.stats()["host_available_bytes"], _core.get_limit("host")
    rest = "no host_limit" if limit >= _core.UNLIMITED else f"host_limit {format_size(limit)}"
    margin = format_size(_core.get_limit("host_margin"))
    advice = "" if available else "nothing with a backup can be paused: free host memory, or lower EBBTIDE_HOST_MARGIN"
    found = f"{format_size(available)} ({rest}, {margin} left to others)"
    yield Finding("host memory", "room for backups", found, "ok" if available else "note", advice)
    yield _disk_backups()


def _disk_backups() -> Finding:
    """Where nothing chose the folder, only disk backups would miss it."""
    from ebbtide import _core

    folder = _disk_folder()
    try:
        _core.check_setting("disk_directory", folder)
    except Error as error:
        problem, _, advice = neutral(error).rpartition(": ")  # doctor's reader may write no Python
        return Finding("host memory", "disk backups", problem or advice, "note", advice)
    free = shutil.disk_usage(folder).free
    return Finding("host memory", "disk backups", f"{os.fsdecode(folder)} ({format_size(free)} free)")


def _disk_folder() -> bytes:
    """What was configured, else what the core takes."""
    from ebbtide import _core

    names = (settings.find("disk_directory").variable, "TMPDIR")
    folders = (os.fsdecode(_core.get_setting("disk_directory")), *map(os.environ.get, names))
    return os.fsencode(Path(next(filter(None, folders), "/var/tmp")).absolute())


def _preloading() -> Iterator[Finding]:
    """What `ebbtide run` needs; regions work without it."""
    try:
        library = preloading.find_library()
    except StateError as error:
        problem, _, advice = str(error).rpartition(": ")
        yield Finding("preloading", "library", problem, "note", advice)
        return
    yield Finding("preloading", "library", str(library))
    yield _preloaded_process()
    if driver_choice.is_simulated_run(os.environ):
        yield Finding("preloading", "libcuda.so.1", f"the simulated driver, {driver_choice.simulated_folder()}")
    obstacle = preload_obstacle(Path(sys.executable), library)
    if obstacle:
        yield Finding("preloading", "this Python", obstacle, "note", "`ebbtide run` needs a Python without that")


def _preloaded_process() -> Finding:
    from ebbtide import _core

    if preloading.is_preload_library(_core.loaded_library()):
        is_active = settings.read_or_fallback("preload", os.environ) != "0"
        return Finding("preloading", "this process", "preloaded" if is_active else "preloaded, and not active")
    named = re.split(r"[ :]+", os.environ.get(preloading.LOADER_VARIABLE, ""))
    if any(preloading.is_preload_library(entry) for entry in named):
        return Finding("preloading", "this process", "LD_PRELOAD names a library, and it was not loaded", "note")
    return Finding("preloading", "this process", "not preloaded: `ebbtide run -- COMMAND` does that")


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
    known = distribution.installed()
    if known is not None and known[1]:
        yield Finding("compatibility", "pip", f"takes ebbtide's module for torch_memory_saver {known[0]}")
    yield from _startup_file()


def _startup_file() -> Iterator[Finding]:
    path, state = str(startup_file.location()), startup_file.state()
    if state == "ours":
        yield Finding("compatibility", "start-up file", f"{path}: EBBTIDE_COMPAT=tms gives ebbtide's")
    if state == "another":
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
