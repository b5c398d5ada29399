"""The environment that starts a program with the preload library: for `ebbtide run`, and for programs that start
workers."""

import os
import re
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from ebbtide import driver_choice, settings
from ebbtide.errors import StateError
from ebbtide.launch import ledger
from ebbtide.launch.run_options import to_variables
from ebbtide.stderr import say

_PACKAGE = Path(__file__).resolve().parents[1]
LIBRARY_NAME = "libebbtide_preload.so"
# The same library under the names that launchers of torch_memory_saver look for, in `compat_path()`.
TMS_LIBRARY_NAMES = tuple(f"torch_memory_saver_hook_mode_preload{cuda}.abi3.so" for cuda in ("", "_cu12", "_cu13"))
LOADER_VARIABLE = "LD_PRELOAD"
MODULES_VARIABLE = "PYTHONPATH"
# Read by llama.cpp: with any value, all its memory would be managed, and none of it ours.
UNIFIED_MEMORY_VARIABLE = "GGML_CUDA_ENABLE_UNIFIED_MEMORY"


def env(**options: Any) -> dict[str, str]:
    """The variables to add to the environment of a process that is to start as under `ebbtide run`.

        subprocess.Popen(command, env={**os.environ, **ebbtide.env(overflow="split", host_limit="8GiB")})

    Args:
        options: those of `ebbtide run` as keywords: overflow, device_limit, device_margin, host_limit, host_margin,
            host_pool, reserve, report, pauseable, pauseable_all, tag, backup, lms, lms_min_size, lms_recompute,
            lms_overflow, compat, summary, log. Sizes are "16GiB" or bytes; None for overflow, backup, lms_recompute or
            compat is "none". An option that is not given stays as this process's environment says.

    Returns:
        All of them, with LD_PRELOAD and, for lms and compat, PYTHONPATH (ours first, then their content here).
        Processes that are started with them by one program share one budget of host memory.
        GGML_CUDA_ENABLE_UNIFIED_MEMORY is to be removed by the caller.

    Raises:
        TypeError, ValueError: as the command refuses it; also a malformed EBBTIDE_* variable that is there already.
        StateError: the preload library is missing, can't be named in LD_PRELOAD, or has no use since the driver is HIP.
    """
    return variables_for(options, os.environ)


def variables_for(
    options: Mapping[str, object], inherited: Mapping[str, str], spell: Callable[[str], str] = str
) -> dict[str, str]:
    """`env` over any environment. Args and errors as `run_options.to_variables`."""
    added = to_variables(options, inherited, spell)
    added[ledger.VARIABLE] = ledger.name_for(inherited)
    in_force = {**inherited, **added}
    if driver_choice.would_be_hip(in_force):
        _refuse_with_hip(in_force)
        added.update(settle_driver(in_force))
    folders = []
    library = find_library()
    if settings.read_or_fallback("compat", in_force) == "tms":
        library = compat_path() / TMS_LIBRARY_NAMES[0]
        folders.append(compat_path())
        added[settings.find("overflow").variable] = settings.read("overflow", in_force) or "none"
    elif str(compat_path()) in (modules := inherited.get(MODULES_VARIABLE, "")).split(os.pathsep):
        added[MODULES_VARIABLE] = os.pathsep.join(own_entries(str(compat_path()), modules))  # an outer run's
    if settings.read("lms", in_force):
        folders.append(startup_path())
    added[LOADER_VARIABLE] = preload_list(library, inherited.get(LOADER_VARIABLE, ""))
    for folder in folders:
        added[MODULES_VARIABLE] = with_first(str(folder), {**inherited, **added}.get(MODULES_VARIABLE, ""))
    return added


def settle_driver(environment: Mapping[str, str]) -> dict[str, str]:
    """EBBTIDE_DRIVER=hip, with which the preload library does nothing, where torch for ROCm alone says so."""
    is_open = settings.read_or_fallback("driver", environment) == "auto" and driver_choice.would_be_hip(environment)
    return {settings.find("driver").variable: "hip"} if is_open else {}


def _refuse_with_hip(environment: Mapping[str, str]) -> None:
    is_for_tms = settings.read_or_fallback("compat", environment) == "tms"
    if not is_for_tms or settings.read("lms", environment) or settings.read("pauseable", environment) == "1":
        raise StateError(
            "the preload library and large model support do not work with HIP: start the program without `ebbtide run` "
            "and call ebbtide.saver in it (only --compat tms works), or set EBBTIDE_DRIVER=cuda if it uses CUDA"
        )


def compat_path() -> Path:
    """The folder with the package torch_memory_saver, for sys.path, and with its preload libraries."""
    return _PACKAGE / "compat" / "tms"


def is_preload_library(path: str | Path) -> bool:
    """Whether this is the preload library, under whichever of its names."""
    return Path(path).name == LIBRARY_NAME or Path(path).name in TMS_LIBRARY_NAMES


def startup_path() -> Path:
    """The folder whose sitecustomize.py every Python runs that finds it on its path."""
    return _PACKAGE / "startup_path"


def find_library() -> Path:
    """The preload library.

    Raises:
        StateError: it is missing, or LD_PRELOAD cannot hold its path.
    """
    path = _PACKAGE / LIBRARY_NAME
    if not path.is_file():
        raise StateError(f"the preload library is missing, {path}: install ebbtide again")
    if re.search(r"[\s:]", str(path)):
        raise StateError(f"LD_PRELOAD takes no path with spaces or colons, like {path}: install ebbtide elsewhere")
    return path


def with_first(folder: str, inherited: str) -> str:
    """A search path with this folder first and once, then the user's own entries. An empty entry is the working
    directory, but an empty value is no entry."""
    return os.pathsep.join([folder, *own_entries(folder, inherited)])


def own_entries(folder: str, inherited: str) -> list[str]:
    """The entries of a search path besides this folder."""
    return [entry for entry in inherited.split(os.pathsep) if entry != folder] if inherited else []


def preload_list(library: Path | str, inherited: str) -> str:
    """The value of LD_PRELOAD: this library first and once, then the user's own libraries in their order.

    Our library goes under its other names, and torch_memory_saver's own where ours has its name: a program has one."""

    def is_replaced(entry: str) -> bool:
        has_its_name = Path(library).name in TMS_LIBRARY_NAMES or Path(entry).parent == compat_path()
        return Path(entry).name == LIBRARY_NAME or (is_preload_library(entry) and has_its_name)

    own = [entry for entry in re.split(r"[ :]+", inherited) if entry and not is_replaced(entry)]
    return ":".join([str(library), *own])


def drop_unified_memory(environment: MutableMapping[str, str]) -> None:
    """Removes GGML_CUDA_ENABLE_UNIFIED_MEMORY from an environment, and prints that to stderr."""
    if environment.pop(UNIFIED_MEMORY_VARIABLE, None) is not None:
        say(f"{UNIFIED_MEMORY_VARIABLE} is unset: it would make all memory managed, beyond ebbtide's control")
