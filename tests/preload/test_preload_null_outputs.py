"""A null pointer in place of an output means to a hook what it means to the driver."""

import json
import re
import sys
from pathlib import Path

import null_outputs
import pytest
from preload_clients import IS_SIMULATED, MIB, Clients

LIMIT = {"EBBTIDE_DEVICE_LIMIT": str(48 * MIB), "EBBTIDE_RESERVE": "0"}
SPLIT = {"EBBTIDE_OVERFLOW": "split", "EBBTIDE_DEVICE_LIMIT": str(24 * MIB), "EBBTIDE_RESERVE": "0"}


def ask(clients: Clients, preload: str | None = "ours", **settings: str) -> dict[str, list[list[int]]]:
    words = ["all"] if IS_SIMULATED else []
    done = clients.start([sys.executable, null_outputs.__file__, *words], preload, **settings)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def codes(results: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
    return {name: [result[:1] for result in found] for name, found in results.items()}


def test_every_hooked_call_is_asked(root: Path) -> None:
    rows = re.findall(r"^EBBTIDE_DRIVER_HOOK\((\w+),", (root / "csrc/preload/hooks.def").read_text(), re.MULTILINE)
    asked = null_outputs.OPTIONAL | null_outputs.REQUIRED | null_outputs.UNDOCUMENTED
    assert set(asked) | null_outputs.WITHOUT_OUTPUTS == set(rows)
    assert not set(asked) & null_outputs.WITHOUT_OUTPUTS


@pytest.mark.parametrize("settings", [LIMIT, SPLIT], ids=["limit", "split"])
def test_the_codes_are_the_drivers(clients: Clients, settings: dict[str, str]) -> None:
    plain, hooked = ask(clients, None), ask(clients, **settings)
    assert codes(hooked) == codes(plain)
    optional = [found for name in null_outputs.OPTIONAL for found in codes(plain)[name]]
    assert optional + codes(plain)["both"] == [[0]] * (len(optional) + 2)
    required = [found[1:] for name, found in codes(plain).items() if name in null_outputs.REQUIRED]
    assert all(code == [1] for found in required for code in found)


@pytest.mark.parametrize("settings", [LIMIT, SPLIT], ids=["limit", "split"])
def test_each_output_is_what_it_is_beside_all_others(clients: Clients, settings: dict[str, str]) -> None:
    results = ask(clients, **settings)
    for name in ("cuMemGetInfo_v2", "cuMemGetAddressRange_v2"):
        (_, first, second), without_first, without_second = results[name]
        assert (without_first, without_second) == ([0, second], [0, first]), name
    assert results["cuMemGetInfo_v2"][0][2] <= int(settings["EBBTIDE_DEVICE_LIMIT"])


@pytest.mark.parametrize("report", ["device", "free", "total"])
def test_one_number_is_reported_as_both_are(clients: Clients, report: str) -> None:
    host = {"EBBTIDE_HOST_LIMIT": str(64 * MIB), "EBBTIDE_HOST_MARGIN": "0"}
    (_, free, total), only_total, only_free = ask(clients, EBBTIDE_REPORT=report, **SPLIT, **host)["cuMemGetInfo_v2"]
    assert (only_total, only_free) == ([0, total], [0, free])
