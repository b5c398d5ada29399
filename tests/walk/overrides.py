"""The backup of one pause, in place of that of the regions."""

from random import Random
from typing import Any

from ebbtide.saver.values import arguments

from .model import Memory

AS_ALLOCATED = "as allocated"
BACKUPS = (AS_ALLOCATED, AS_ALLOCATED, AS_ALLOCATED, "ram", "pinned", "disk", None)

Override = str | dict[str, str | None] | None  # for all tags, or for each


def draw_override(rng: Random, tags: list[str]) -> Override:
    if tags and rng.random() < 0.25:
        return {tag: rng.choice(BACKUPS) for tag in tags}
    return rng.choice(BACKUPS)


def keeps(memory: Memory, backup: Override) -> bool:
    """Whether a pause with this override has a backup for the memory."""
    if isinstance(backup, dict):
        backup = backup[memory.tag or ""]
    chosen = memory.policy.backup if backup == AS_ALLOCATED and memory.policy else backup
    return chosen is not None


def leaving_of(tags: list[str], backup: Override) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a pause: tags, or one dict of each to its backup; and the options."""
    if isinstance(backup, dict):
        return [{tag: arguments.AS_ALLOCATED if one == AS_ALLOCATED else one for tag, one in backup.items()}], {}
    return list(tags), {} if backup == AS_ALLOCATED else {"backup": backup}
