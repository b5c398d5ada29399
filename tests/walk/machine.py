"""The walk as a state machine of hypothesis."""

import contextlib
import gc
import itertools
import json
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from random import Random
from typing import Any, ClassVar

from ebbtide import saver
from hypothesis import HealthCheck, Phase, note, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from . import checks, device
from .model import Skip
from .ops import load
from .ops.limits import set_defaults
from .overrides import BACKUPS, leaving_of
from .world import World

STEP_SECONDS_MAX = 120  # a longer step hangs, and the alarm ends the process
LENGTH = 150  # steps after which everything is let go
OPERATIONS = {name: one for name, one in load().items() if device.IS_SIM or not one.sim_only}
# Each name as often as its weight says.
NAMES = [name for name, one in OPERATIONS.items() for _ in range(round(10 * one.weight))]

_numbers = itertools.count(1)


class Walk(RuleBasedStateMachine):
    """One walk. Several may follow each other in a process, each with its own tags."""

    waits_may_fail = False
    counts: ClassVar = Counter[str]()  # what was done, in all walks
    failures: ClassVar[list[str]] = []

    def __init__(self) -> None:
        super().__init__()
        self.world = World(f"walk{next(_numbers)}", self.waits_may_fail)
        self.is_sound = True
        self.hook, sys.unraisablehook = sys.unraisablehook, self._note_unraisable
        set_defaults(self.world)

    @initialize(ends_paused=st.booleans())
    def begin(self, ends_paused: bool) -> None:
        self.world.ends_paused = ends_paused

    @rule(name=st.sampled_from(NAMES), number=st.integers(0, 2**32 - 1))
    def step(self, name: str, number: int) -> None:
        operation, world = OPERATIONS[name], self.world
        arguments = operation.draw(world, Random(f"{name} {number}"))
        if arguments is None:
            return
        note(f"  {name} {json.dumps(arguments)}")
        with self._watched():
            try:
                result = operation.run(world, **arguments)
            except Skip:
                result = "passed by"
            world.last_step, world.was_interrupted = name, result == "interrupted"
            self.counts[f"{name}: {result or 'done'}"] += 1
            checks.check_step(world)

    def teardown(self) -> None:
        try:
            if self.is_sound:
                with self._watched():
                    set_defaults(self.world)
                    checks.end(self.world)
        finally:
            if not self.is_sound:
                self._let_go()
                gc.collect()
            self.world.actors.stop()
            signal.alarm(0)
            sys.unraisablehook = self.hook

    @contextlib.contextmanager
    def _watched(self) -> Any:
        signal.alarm(STEP_SECONDS_MAX)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        except Exception as error:
            self.is_sound = False
            self.failures.append(f"{type(error).__name__}: {error}")
            raise

    def _let_go(self) -> None:
        """After a failure: the next walk, which may be a shorter one, finds little of this one."""
        model = self.world.model
        removers = [remove for removers in model.hooks.values() for remove in removers]
        for act in (checks.set_room_free, set_defaults, World.close_all):
            with contextlib.suppress(Exception):
                act(self.world)
        for act in (*removers, saver.resume, model.memories.clear, model.views.clear, gc.collect, saver.trim):
            with contextlib.suppress(Exception):
                act()

    def _note_unraisable(self, what: Any) -> None:
        if not isinstance(what.exc_value, KeyboardInterrupt):
            self.world.unraisable.append(f"{what.exc_value!r} in {what.object!r}")


def warm_up() -> dict[str, Any]:
    """Uses once everything that the process keeps. The result is what the process may hold at the end."""
    import torch

    for backup in dict.fromkeys(BACKUPS):
        with saver.region("warm-up"):
            made = torch.ones(30 << 20, dtype=torch.uint8, device=saver.device)
        leaving, options = leaving_of(["warm-up"], backup)
        saver.pause(*leaving, **options)
        saver.resume("warm-up", wait=False).wait()
        del made
        saver.trim("warm-up")
    return device.resources()


@contextlib.contextmanager
def without_leaks(waits_may_fail: bool) -> Iterator[None]:
    """Warms up, and checks at the end that walks have left nothing."""
    before = warm_up()
    yield
    checks.check_leaks(before, waits_may_fail)


def walk(steps: int, seed: int | None, *, waits_may_fail: bool = False, shrinks: bool = True) -> None:
    """Walks of LENGTH steps. They are the same ones for the same seed.

    Raises:
        Failure: the real state differed from the model; or whatever else a step raised.
    """
    chosen = settings(
        max_examples=max(1, steps // LENGTH),
        stateful_step_count=min(steps, LENGTH),
        deadline=None,
        database=None,
        derandomize=seed is None,
        print_blob=True,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink) if shrinks else (Phase.generate,),
    )
    machine = type("Walk", (Walk,), {"waits_may_fail": waits_may_fail})
    run_state_machine_as_test(machine if seed is None else seeded(seed)(machine), settings=chosen)
