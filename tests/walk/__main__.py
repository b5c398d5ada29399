"""The command of the walk; the docstring of the package explains it."""

import argparse
import faulthandler
import os
import time

# Set before ebbtide is imported, because the first use of the device fixes these.
os.environ.setdefault("EBBTIDE_DRIVER", os.environ.get("EBBTIDE_TEST_DRIVER", "sim"))
os.environ.setdefault("OMP_NUM_THREADS", "1")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.walk", description="A random walk over ebbtide.saver.")
    parser.add_argument("--steps", type=int, default=2000, help="of all walks together (2000)")
    parser.add_argument("--seed", type=int, help="the same walks for the same seed; by default always the same")
    parser.add_argument("--waits-may-fail", action="store_true", help="faults may hit functions that wait, too")
    parser.add_argument("--counts", action="store_true", help="what was done, and how often")
    given = parser.parse_args()
    faulthandler.enable()
    from . import machine

    start = time.monotonic()
    with machine.without_leaks(given.waits_may_fail):
        machine.walk(given.steps, given.seed, waits_may_fail=given.waits_may_fail)
        seconds, done = time.monotonic() - start, machine.Walk.counts.total()
        print(f"{done} steps, {seconds:.1f} s, {done / seconds:.0f} steps/s")
        if given.counts:
            print("\n".join(f"{count:7} {what}" for what, count in sorted(machine.Walk.counts.items())))


if __name__ == "__main__":
    main()
