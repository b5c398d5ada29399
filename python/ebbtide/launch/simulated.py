"""`ebbtide run --simulate`: the simulated device for plain programs of CUDA's driver API.

The folder `simulated/` of the package has the simulated driver as libcuda.so.1. On LD_LIBRARY_PATH the folder comes
before the libraries of the system, so a program that is linked against the driver, or opens it by its name, gets the
simulated one. The preload library stands before it as before the real one.
"""

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from ebbtide import settings
from ebbtide.driver_choice import LIBRARY_PATH_VARIABLE, is_simulated_run, simulated_folder
from ebbtide.driver_choice import VARIABLE as DRIVER_VARIABLE
from ebbtide.errors import StateError
from ebbtide.launch.programs import find_own_library
from ebbtide.launch.search_path import own_entries, with_first

OPTION = "simulate"
LIBRARY_NAME = "libcuda.so.1"
CAPACITY = "sim_capacity"


def to_variables(wanted: object, inherited: Mapping[str, str], spell: Callable[[str], str]) -> dict[str, str]:
    """The variables to add.

    Args:
        wanted: True, or the size of the device ("8GiB" or bytes); False for the driver of the system, also inside a run
            with the simulated device.
        inherited: the environment.
        spell: how the option is written in errors.

    Raises:
        TypeError, ValueError: `wanted` is neither, or a malformed size.
        StateError: this package lacks the simulated driver, or LD_LIBRARY_PATH can't name its folder.
    """
    folder, path = str(simulated_folder()), inherited.get(LIBRARY_PATH_VARIABLE, "")
    if wanted is False:
        entries = own_entries(folder, path)
        return {LIBRARY_PATH_VARIABLE: os.pathsep.join(entries)} if is_simulated_run(inherited) else {}
    added = {}
    if wanted is not True:
        capacity = settings.find(CAPACITY)
        added[capacity.variable] = settings.check(capacity, wanted, spell(OPTION))
    _check_library()
    added[LIBRARY_PATH_VARIABLE] = with_first(folder, path)
    if settings.read("driver", inherited) == "sim":
        # It is for CPU tensors, and switches the preload library off. Regions find the simulated device without it.
        added[DRIVER_VARIABLE] = "auto"
    return added


def obstacle(program: Path) -> str:
    """Why this program would meet another driver than the simulated one; "" if it would not, or if that is unknown."""
    library = find_own_library(program, LIBRARY_NAME)
    if library is None or library.parent.resolve() == simulated_folder():
        return ""
    return f"{program} finds {library} by its RPATH: it is used in place of the simulated driver"


def _check_library() -> None:
    folder = simulated_folder()
    for library in (folder / LIBRARY_NAME, folder.with_name("libebbtide_sim.so")):
        if not library.is_file():
            raise StateError(f"the simulated driver is missing, {library}: install ebbtide again")
    if re.search(r"[;$]", str(folder)):  # more than LD_PRELOAD refuses
        raise StateError(
            f"LD_LIBRARY_PATH takes no path with semicolons or dollar signs, like {folder}: install ebbtide elsewhere"
        )
