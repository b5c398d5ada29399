"""The walks that CI makes: `python -m tests.walk.ci`."""

import os

# Set before ebbtide is imported, because the first use of the device fixes these.
os.environ.setdefault("EBBTIDE_DRIVER", os.environ.get("EBBTIDE_TEST_DRIVER", "sim"))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import faulthandler
import sys
from typing import NamedTuple

from . import machine


class Share(NamedTuple):
    """A walk of CI."""

    seed: int
    copy_threads: int
    waits_may_fail: bool  # faults may hit functions that wait, too
    steps: int = 600

    def walk(self, *, shrinks: bool = True) -> None:
        machine.walk(self.steps, self.seed, waits_may_fail=self.waits_may_fail, shrinks=shrinks)


SHARES = (Share(1, 1, waits_may_fail=False), Share(2, 4, waits_may_fail=True))


def fork(share: Share) -> int:
    """As os.fork. The child is to make this walk: it has a device of its own, and needs no import of torch."""
    child = os.fork()
    if child == 0:
        os.environ["EBBTIDE_COPY_THREADS"] = str(share.copy_threads)
    return child


def main() -> int:
    """The status of the first walk that failed, or 0."""
    faulthandler.enable()
    for share in SHARES:
        child = fork(share)
        if child == 0:
            with machine.without_leaks(share.waits_may_fail):
                share.walk()
            return 0
        if status := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            print(f"failed with status {status}: {share}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
