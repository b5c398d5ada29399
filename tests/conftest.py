"""What every test shares: which driver it runs on, what may be skipped there, and the repository's root.

EBBTIDE_TEST_DRIVER=sim|cuda|hip (default sim) chooses the driver; with EBBTIDE_SIM_HIP=1 the simulator is called by
HIP's names. EBBTIDE_NO_SKIPS=1 turns a skip into a failure, unless the test is marked `expected_skip(reason)`: on a GPU
machine a test that did not run must not look like one that passed.
EBBTIDE_VLLM_TESTS is a file of vLLM's allocator tests to run, and EBBTIDE_VLLM_SOURCES a folder with a folder of vLLM's
sources for each release that the tests know.
"""

import os
import signal
from collections.abc import Generator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DRIVER = os.environ.get("EBBTIDE_TEST_DRIVER", "sim")

# A shell starts what runs in the background with Ctrl-C ignored, and the programs that tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

SPEAKS_HIP = DRIVER == "hip" or (DRIVER == "sim" and os.environ.get("EBBTIDE_SIM_HIP") == "1")

# Before any test imports ebbtide: the first use of the device fixes the choice.
os.environ["EBBTIDE_DRIVER"] = DRIVER
# The simulated device's tests run as on a machine without a GPU, whatever this one has; what they start does, too.
if DRIVER == "sim":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def skips_are_failures() -> bool:
    return os.environ.get("EBBTIDE_NO_SKIPS", "") not in ("", "0")


def pytest_configure() -> None:
    if DRIVER not in ("sim", "cuda", "hip"):
        raise pytest.UsageError(f"EBBTIDE_TEST_DRIVER={DRIVER}: use sim, cuda or hip")
    if DRIVER != "sim":
        import torch

        if not torch.cuda.is_available() or getattr(torch.version, DRIVER, None) is None:
            raise pytest.UsageError(
                f"EBBTIDE_TEST_DRIVER={DRIVER}, but torch {torch.__version__} sees no such GPU. "
                "On a machine with one: make gpu-test SYSTEM=1"
            )


@pytest.hookimpl(trylast=True)  # after the folders' own, which may add marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The simulator's own tests are no part of a GPU run; the GPU's own are shown as skipped elsewhere, and CUDA's own
    where the driver is HIP."""
    for item in items if SPEAKS_HIP else ():
        if (mark := item.get_closest_marker("cuda_only")) is not None:
            item.add_marker(pytest.mark.skip(reason=mark.args[0]))
            item.add_marker(pytest.mark.expected_skip(mark.args[0]))
    if DRIVER == "sim":
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU: make gpu-test"))
        return
    foreign = [item for item in items if item.get_closest_marker("sim_only")]
    if foreign:
        config.hook.pytest_deselected(items=foreign)
        items[:] = [item for item in items if item not in foreign]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    is_plain_skip = report.skipped and not hasattr(report, "wasxfail")
    if is_plain_skip and skips_are_failures() and not item.get_closest_marker("expected_skip"):
        report.outcome = "failed"
        report.longrepr = f"unexpected skip (EBBTIDE_NO_SKIPS=1): {call.excinfo.value if call.excinfo else ''}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """A whole file that skips itself counts as well."""
    report = yield
    if report.skipped and skips_are_failures():
        report.outcome = "failed"
        report.longrepr = f"unexpected skip of a whole file (EBBTIDE_NO_SKIPS=1): {report.longrepr}"
    return report


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's root."""
    return ROOT


@pytest.fixture(scope="session")
def driver_name() -> str:
    """The driver under test: "sim", "cuda" or "hip"."""
    return DRIVER
