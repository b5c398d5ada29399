"""One walk: its steps are drawn from a seed or read from a file, and compared with the model."""

import gc
import json
import signal
import sys
import time
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from ebbtide import saver

from . import checks, device
from .model import Skip
from .ops import Operation, load
from .ops.limits import set_defaults
from .world import World

Step = tuple[str, dict[str, Any]]
STEP_SECONDS_MAX = 120  # a longer step hangs, and the alarm ends the process


@dataclass
class Outcome:
    """The result of a walk. `failure` is empty if it succeeded."""

    seed: int
    steps: list[Step] = field(default_factory=list)
    failure: str = ""
    counts: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def save(self, path: Path) -> None:
        """Writes the file for --replay and --shrink."""
        path.write_text(json.dumps({"seed": self.seed, "failure": self.failure, "steps": self.steps}))


def read_steps(path: Path) -> list[Step]:
    """The steps of a saved walk."""
    return [(name, arguments) for name, arguments in json.loads(path.read_text())["steps"]]


class Walk:
    """A walk in this process. Several may follow each other, each with its own tags."""

    def __init__(self, seed: int, prefix: str) -> None:
        self._operations = load()
        self._rng = Random(seed)
        self._world = World(prefix, seed)
        self._world.ends_paused = seed % 2 == 0
        self.outcome = Outcome(seed)

    def run(self, step_count: int) -> Outcome:
        """Draws and runs this many steps."""
        names = [name for name, one in self._operations.items() if device.IS_SIM or not one.sim_only]
        weights = [self._operations[name].weight for name in names]

        def draw() -> Step:
            while True:
                name = self._rng.choices(names, weights)[0]
                arguments = self._operations[name].draw(self._world, self._rng)
                if arguments is not None:
                    return name, arguments

        return self._go(draw() for _ in range(step_count))

    def replay(self, steps: list[Step]) -> Outcome:
        """Runs these steps. A step whose objects do not exist is skipped."""
        return self._go(iter(steps))

    def _go(self, steps: Any) -> Outcome:
        start = time.monotonic()
        hook, sys.unraisablehook = sys.unraisablehook, self._note_unraisable
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                set_defaults(self._world)
                for name, arguments in steps:
                    self.outcome.steps.append((name, arguments))
                    self._step(self._operations[name], arguments)
                self._end()
        except Exception as error:
            self.outcome.failure = f"{type(error).__name__}: {error}"
            self.outcome.error = error  # type: ignore[attr-defined]
        finally:
            signal.alarm(0)
            sys.unraisablehook = hook
        self.outcome.seconds = time.monotonic() - start
        return self.outcome

    def _step(self, operation: Operation, arguments: dict[str, Any]) -> None:
        signal.alarm(STEP_SECONDS_MAX)
        world = self._world
        try:
            result = operation.run(world, **json.loads(json.dumps(arguments)))
        except Skip:
            result = "passed by"
        world.last_step = operation.name
        world.was_interrupted = result == "interrupted"
        self.outcome.counts[f"{operation.name}: {result or 'done'}"] += 1
        checks.check_step(world)

    def _end(self) -> None:
        set_defaults(self._world)
        checks.end(self._world)
        self._world.actors.stop()
        gc.collect()

    def _note_unraisable(self, what: Any) -> None:
        if isinstance(what.exc_value, KeyboardInterrupt):
            return
        self._world.unraisable.append(f"{what.exc_value!r} in {what.object!r}")


def warm_up() -> dict[str, Any]:
    """Uses once everything that the process keeps. The result is what the process may hold at the end."""
    import torch

    from .overrides import BACKUPS, leaving_of

    for backup in dict.fromkeys(BACKUPS):
        with saver.region("warm-up"):
            made = torch.ones(30 << 20, dtype=torch.uint8, device=saver.device)
        leaving, options = leaving_of(["warm-up"], backup)
        saver.pause(*leaving, **options)
        saver.resume("warm-up", wait=False).wait()
        del made
        saver.trim("warm-up")
    return device.resources()


def failure_text(outcome: Outcome, path: Path) -> str:
    """The message of a failure, with the command that repeats it."""
    last = [f"  {number}: {name} {json.dumps(arguments)}" for number, (name, arguments) in enumerate(outcome.steps)][
        -12:
    ]
    return "\n".join(
        [
            f"seed {outcome.seed}, step {len(outcome.steps) - 1}: {outcome.failure}",
            "the last steps:",
            *last,
            f"again: python -m tests.walk --replay {path}",
            f"shorter: python -m tests.walk --shrink {path}",
        ]
    )
