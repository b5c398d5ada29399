"""Malformed variables in a preloaded program: each is reported once, and the program runs as if it were not set."""

from pathlib import Path

import pytest
from checks.settings import BAD_VARIABLES, bad_values, sentences
from preload_clients import IS_SIMULATED, MIB, Clients

# With these, the program would have no device, or none that can overflow; and a GPU's driver does not read the last.
KEPT = {} if IS_SIMULATED else {"EBBTIDE_SIM_DEVICES", "EBBTIDE_SIM_CAPACITY", "EBBTIDE_SIM_SHARED"}


@pytest.mark.parametrize("way", ["linked", "cudart12"])
def test_all_at_once_are_said_once_each_and_ignored(clients: Clients, way: str) -> None:
    plain = clients.run(way, "take", "alloc", 6 * MIB, EBBTIDE_SIM_CAPACITY="")  # with the default capacity
    done = clients.run(way, "take", "alloc", 6 * MIB, **bad_values())
    assert done.returncode == plain.returncode == 0
    if IS_SIMULATED:  # another program may use a GPU's memory meanwhile
        assert done.stdout.split()[-1] == plain.stdout.split()[-1], "the device's size"
    said = [line for line in done.stderr.splitlines() if line.endswith("; it is ignored")]
    wanted = [sentence for variable, sentence in sentences().items() if variable not in KEPT]
    assert sorted(said) == sorted(f"ebbtide: {sentence}; it is ignored" for sentence in wanted)


@pytest.mark.parametrize("variable", BAD_VARIABLES)
def test_one_alone_changes_nothing(clients: Clients, variable: str) -> None:
    if variable in KEPT:
        return
    done = clients.run("linked", "take", "alloc", 6 * MIB, **{variable: BAD_VARIABLES[variable][0]})
    assert done.returncode == 0
    assert done.stderr == f"ebbtide: {sentences()[variable]}; it is ignored\n"


def test_a_folder_that_no_pause_could_use_is_said_at_the_start(clients: Clients, tmp_path: Path) -> None:
    settings = {"EBBTIDE_PAUSEABLE": "1", "EBBTIDE_BACKUP": "disk", "EBBTIDE_DISK_DIRECTORY": str(tmp_path / "missing")}
    done = clients.run("linked", "take", "alloc", 6 * MIB, **settings)
    assert done.returncode == 0
    (line,) = [line for line in done.stderr.splitlines() if "missing" in line]
    assert line.startswith("ebbtide: no file for a backup can be made in") and "set EBBTIDE_DISK_DIRECTORY to" in line
