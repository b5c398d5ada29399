"""The command of the walk; the docstring of the package explains it."""

import argparse
import faulthandler
import json
import os
import sys
import traceback
from pathlib import Path

# Set before ebbtide is imported, because the first use of the device fixes these.
os.environ.setdefault("EBBTIDE_DRIVER", os.environ.get("EBBTIDE_TEST_DRIVER", "sim"))
os.environ.setdefault("OMP_NUM_THREADS", "1")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.walk", description="A random walk over ebbtide.saver.")
    parser.add_argument("--steps", type=int, default=2000, help="steps of each walk (2000)")
    parser.add_argument("--seed", type=int, action="append", help="of a walk; may be given several times (1)")
    parser.add_argument("--length", type=int, default=2000, help="steps after which everything is let go (2000)")
    parser.add_argument("--replay", type=Path, help="the steps of a file")
    parser.add_argument("--shrink", type=Path, help="the shortest list of a file's steps that still fails")
    parser.add_argument("--save", type=Path, help="where the steps of a failure go (walk-SEED.json)")
    parser.add_argument("--counts", action="store_true", help="what was done, and how often")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    faulthandler.enable()
    from . import checks, device, runner

    if arguments.shrink:
        return shrink_file(arguments.shrink, arguments.save)
    before = runner.warm_up()
    if arguments.replay:
        outcomes = [runner.Walk(0, "walk").replay(runner.read_steps(arguments.replay))]
    else:
        outcomes = []
        for seed in arguments.seed or [1]:
            for part, begin in enumerate(range(0, arguments.steps, arguments.length)):
                steps = min(arguments.length, arguments.steps - begin)
                name = seed + part * 1_000_000  # an even seed stays even: see world.waits_may_fail
                outcomes.append(runner.Walk(name, f"walk{len(outcomes)}").run(steps))
                if outcomes[-1].failure:
                    break
                if len(outcomes) == 1 and not device.IS_SIM:  # memory that CUDA takes at first use
                    before[device.ANONYMOUS] = device.resources()[device.ANONYMOUS]
                if begin + steps < arguments.steps:
                    print(f"seed {seed}: {begin + steps} steps", flush=True)
    status = 0
    for outcome in outcomes:
        if outcome.failure:
            path = arguments.save or Path(f"walk-{outcome.seed}.json")
            outcome.save(path)
            traceback.print_exception(outcome.error)
            print(runner.failure_text(outcome, path))
            status = 1
    steps = sum(len(outcome.steps) for outcome in outcomes)
    seconds = sum(outcome.seconds for outcome in outcomes)
    print(f"{steps} steps in {len(outcomes)} walks, {seconds:.1f} s, {steps / max(seconds, 1e-9):.0f} steps/s")
    if arguments.counts:
        total = sum((outcome.counts for outcome in outcomes), start=type(outcomes[0].counts)())
        print("\n".join(f"{count:7} {what}" for what, count in sorted(total.items())))
    if status == 0 and not arguments.replay:
        checks.check_leaks(before, outcomes)
    sys.stdout.flush()
    return status


def shrink_file(path: Path, target: Path | None) -> int:
    from . import runner
    from .shrink import shrink

    found = shrink(runner.read_steps(path), 300)
    target = target or path.with_suffix(".short.json")
    target.write_text(json.dumps({"seed": 0, "failure": "", "steps": found}))
    print("\n".join(f"{name} {json.dumps(arguments)}" for name, arguments in found))
    print(f"again: python -m tests.walk --replay {target}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
