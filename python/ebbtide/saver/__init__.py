"""Pauses and resumes torch's device memory by tag. Addresses stay the same.

    from ebbtide import saver

    with saver.region("weights"):
        model = build_model().to(saver.device)
    saver.pause("weights")      # the device memory is free for others
    saver.resume("weights")     # same addresses, same bytes

Importing this decides nothing. The first region chooses the driver (`EBBTIDE_DRIVER`) and checks whether torch fits it.
Under `ebbtide run --pauseable` everything that the program allocates has a tag already.
"""

from typing import TYPE_CHECKING

from ebbtide.saver.adoption.adopt import adopt
from ebbtide.saver.operations import queries
from ebbtide.saver.operations.configuration import configure
from ebbtide.saver.operations.configuration import settings_in_force as settings
from ebbtide.saver.operations.demote import demote
from ebbtide.saver.operations.pause_resume import pause, paused, resume
from ebbtide.saver.operations.pending import Pending
from ebbtide.saver.operations.prepare import Preparation, prepare
from ebbtide.saver.operations.promote import promote
from ebbtide.saver.operations.queries import backup_of, is_paused, stats, tags, where
from ebbtide.saver.operations.swap import swap
from ebbtide.saver.operations.trim import trim
from ebbtide.saver.regions import startup
from ebbtide.saver.regions.graphs import cuda_graph, graph_pool
from ebbtide.saver.regions.region import disabled, region
from ebbtide.saver.state.hooks import on
from ebbtide.saver.survey.explain import explain
from ebbtide.saver.survey.survivors import survivors
from ebbtide.saver.values.explanation import CopiedTensor, Explanation
from ebbtide.saver.values.progress import Progress
from ebbtide.saver.values.reports import Adoption, Event, Held, Moved, Report, Swap, TagStatus, TagTable
from ebbtide.saver.values.survivors import Survivor, Survivors
from ebbtide.saver.values.whereabouts import Whereabouts

if TYPE_CHECKING:
    device: str
    """Where tensors must be to live in regions: "cuda", or "cpu" on the simulated device."""

    timeline: list[Event]
    """The newest 1,024 events, oldest first."""

__all__ = [
    "Adoption",
    "CopiedTensor",
    "Event",
    "Explanation",
    "Held",
    "Moved",
    "Pending",
    "Preparation",
    "Progress",
    "Report",
    "Survivor",
    "Survivors",
    "Swap",
    "TagStatus",
    "TagTable",
    "Whereabouts",
    "adopt",
    "backup_of",
    "configure",
    "cuda_graph",
    "demote",
    "device",
    "disabled",
    "explain",
    "graph_pool",
    "is_paused",
    "on",
    "pause",
    "paused",
    "prepare",
    "promote",
    "region",
    "resume",
    "settings",
    "stats",
    "survivors",
    "swap",
    "tags",
    "timeline",
    "trim",
    "where",
]


def __getattr__(name: str) -> str | list[Event]:
    if name == "device":
        return startup.device_type()
    if name == "timeline":
        return queries.timeline()
    raise AttributeError(f"module 'ebbtide.saver' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


startup.introduce_program()
