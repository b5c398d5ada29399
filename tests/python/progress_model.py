"""What the tests of progress share: operations that are seen while they run, and waiting for the thread that tells."""

import faulthandler
import sys
import time

import pytest
import torch
from ebbtide import _core
from ebbtide import saver as saver_module
from ebbtide.saver.copying import paced
from ebbtide.saver.telling import watch

BLOCK = 1 << 22  # numbers of 4 bytes
SIZE = 4 * BLOCK
WORK = (
    *((_core, name) for name in ("pause", "resume", "swap", "prepare", "demote", "promote")),
    *((paced, "copy_now"), (paced.PacedCopy, "copy")),
)


def hold(monkeypatch, before=lambda: True, after=lambda: True):
    """Makes each operation wait until these conditions hold, before and after it moves bytes."""

    def held(function):
        def work(*arguments, **options):
            wait_until(before)
            result = function(*arguments, **options)
            wait_until(after)
            return result

        return work

    for owner, name in WORK:
        monkeypatch.setattr(owner, name, held(getattr(owner, name)))


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
