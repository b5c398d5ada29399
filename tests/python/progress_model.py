"""What the tests of progress share: operations that take a while, and waiting for the thread that tells of them."""

import faulthandler
import sys
import time

import pytest
import torch
from core_sim import Sim
from ebbtide import saver as saver_module
from ebbtide.saver.telling import watch

BLOCK = 1 << 22  # numbers of 4 bytes
SIZE = 4 * BLOCK


def simulator():
    made = Sim()
    yield made
    made.delay("cuMemUnmap", 0)
    made.clear_failures()


def slow_operations(sim):
    """Makes each operation that maps or unmaps memory take a while."""
    sim.delay("cuMemUnmap", 0.3)
    sim.delay("cuMemMap", 0.3)
    yield sim
    sim.delay("cuMemMap", 0)


def short_thresholds(monkeypatch):
    """Afterwards the default display, and no operation that is shown."""
    monkeypatch.setattr(watch, "CALLBACK_SECONDS", 0.0)
    monkeypatch.setattr(watch, "BAR_SECONDS", 0.0)
    monkeypatch.setattr(watch, "POLL_SECONDS", 0.02)
    yield
    saver_module.configure(progress=None)
    settled()


def wait_until(is_true):
    deadline = time.monotonic() + 30
    while not is_true():
        if time.monotonic() > deadline:
            faulthandler.dump_traceback(sys.__stderr__)  # of every thread, so of the one that draws as well
            pytest.fail(f"still shown: {watch._watches}")
        time.sleep(0.01)


def settled():
    wait_until(lambda: not watch._watches)


def block(saver, tag):
    with saver.region(tag):
        return torch.arange(BLOCK, dtype=torch.int32, device=saver.device)
