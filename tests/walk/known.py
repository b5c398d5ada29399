"""Defects that are known and not mended yet: what would meet one is left out of the walk.

A row goes when its defect is mended. `python -m tests.walk --without-known` walks as if the table were empty.
"""

from collections.abc import Callable
from typing import Any

from ebbtide import saver

from .model import Model

Arguments = dict[str, Any]
Predicate = Callable[[Model, str, Arguments], bool]


def _adopts_lent(model: Model, name: str, arguments: Arguments) -> bool:
    if name != "adopt":
        return False
    chosen = [model.memories[number] for number in arguments["numbers"] if number in model.memories]
    holders = [memory.holder for memory in chosen if memory.holder is not None]
    mates = [memory for memory in model.memories.values() if any(memory.holder is holder for holder in holders)]
    return any(memory.may_be_lent for memory in [*chosen, *mates])


_WITH_BLOCKS = ("allocate_in_region", "adopt", "paused", "trim_or_promote")


def _interrupts_with_block(_: Model, name: str, arguments: Arguments) -> bool:
    return name in _WITH_BLOCKS and (arguments["trouble"] or [""])[0] == "interrupt"


def _pauses_half_paused(_: Model, name: str, arguments: Arguments) -> bool:
    if name != "paused":
        return False
    chosen = [status for tag, status in saver.tags().items() if not arguments["tags"] or tag in arguments["tags"]]
    return any(status.resident_bytes and status.stored_bytes + status.dropped_bytes for status in chosen)


def _drops_what_had_spilled(model: Model, name: str, arguments: Arguments) -> bool:
    if name not in ("pause", "swap", "paused", "hook_that_asks"):
        return False
    tags = arguments["leaving"] if name == "swap" else arguments["tags"]
    backup = arguments.get("backup", "as allocated")
    for memory in model.of_tags(tags):
        if memory.policy is not None and memory.is_paused and memory.policy.overflow:
            chosen = memory.policy.backup if backup == "as allocated" else backup
            if chosen is None:
                return True
    return False


def _waits_with_hooks(model: Model, name: str, arguments: Arguments) -> bool:
    return name == "ask_pending" and arguments["what"] == "wait" and bool(model.hooks)


def _forks_beside_threads(_: Model, name: str, arguments: Arguments) -> bool:
    return name == "fork" and arguments["busy_threads"] > 0


def _collects_elsewhere(model: Model, name: str, arguments: Arguments) -> bool:
    if name != "leave" or arguments["by"] is None:
        return False
    found = [
        actor
        for actor, scopes in enumerate(model.routes.scopes)
        for scope in scopes
        if scope.number == arguments["number"] and scope.generator is not None
    ]
    return bool(found) and found[0] != arguments["by"]


def _writes_what_is_read_only(_: Model, name: str, arguments: Arguments) -> bool:
    return name == "write_backup" and not arguments["is_writable"]


def _ends_generator_of_trimmed(model: Model, name: str, arguments: Arguments) -> bool:
    """Found by this walk: a decorated generator's end enters its region, which can be out of memory. What is raised in
    a collected one nobody can catch."""
    if name != "generate" or arguments["what"] != "collect" or arguments["number"] not in model.generators:
        return False
    status = saver.tags().get(model.generators[arguments["number"]][0].tag)
    return status is not None and status.trimmed_bytes > 0


def _never(_: Model, name: str, arguments: Arguments) -> bool:
    """Only a check at the end asks whether it is open."""
    return False


KNOWN: dict[int, Predicate] = {
    1: _adopts_lent,
    2: _interrupts_with_block,
    3: _pauses_half_paused,
    4: _drops_what_had_spilled,
    5: _never,
    7: _waits_with_hooks,
    8: _forks_beside_threads,
    11: _collects_elsewhere,
    13: _writes_what_is_read_only,
    14: _ends_generator_of_trimmed,  # not in the list of thirteen
}


def is_open(defect: int) -> bool:
    """Whether it is still there: what checks of the end state ask."""
    return defect in KNOWN


def find(model: Model, name: str, arguments: Arguments) -> int | None:
    """The known defect that this step would meet."""
    return next((number for number, meets in KNOWN.items() if meets(model, name, arguments)), None)
