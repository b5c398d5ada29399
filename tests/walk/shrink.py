"""Delta debugging: finds the shortest list of steps that still fails in the same way.

Each try runs in a child of this process, which has imported everything and used no device.
"""

import os
import re
import signal
import sys
from collections.abc import Callable
from typing import Any

from . import runner

Step = tuple[str, dict[str, Any]]


def kind_of(failure: str) -> str:
    """The failure without the parts that differ from try to try: numbers, addresses, names."""
    return re.sub(r"0x[0-9a-f]+|\d+|'[^']*'", "#", failure)[:80]


def outcome_of(steps: list[Step], seconds: int, plant: Callable[[], None] | None = None) -> str:
    """The failure of these steps, or "" if there is none. A crash or a hang is a failure, too. `plant` breaks something
    in the child, to show what the walk reports."""
    reader, writer = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        signal.alarm(seconds)
        os.close(reader)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        runner.warm_up()
        if plant is not None:
            plant()
        outcome = runner.Walk(0, "walk0").replay(steps)
        os.write(writer, outcome.failure.encode()[:4000])
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        failure = pipe.read().decode()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == 0:
        return failure
    return "it hangs" if status == -signal.SIGALRM else f"it ends with {status}"


def shrink(steps: list[Step], seconds: int, say: Any = print, plant: Callable[[], None] | None = None) -> list[Step]:
    """Removes the steps that are not needed, halves first."""
    wanted = kind_of(outcome_of(steps, seconds, plant))
    if not wanted:
        say("these steps do not fail")
        return steps
    say(f"{len(steps)} steps: {wanted}")
    size = max(1, len(steps) // 2)
    while True:
        begin = 0
        has_changed = False
        while begin < len(steps):
            fewer = steps[:begin] + steps[begin + size :]
            if fewer and kind_of(outcome_of(fewer, seconds, plant)) == wanted:
                steps, has_changed = fewer, True
                say(f"{len(steps)} steps", flush=True)
            else:
                begin += size
        if size == 1 and not has_changed:
            return steps
        size = max(1, size // 2)
