"""Pauses and resumes torch's device memory by tag. Addresses stay the same.

    from ebbtide import saver

    with saver.region("weights"):
        model = build_model().to(saver.device)
    saver.pause("weights")      # the device memory is free for others
    saver.resume("weights")     # same addresses, same bytes

Make and tag memory:

    region(tag)         a `with` block: torch's allocations inside have the tag
    adopt(x, tag=tag)   moves tensors that exist into a tag
    disabled()          a `with` block: ordinary memory inside a region
    cuda_graph(graph)   torch.cuda.graph with its memory under a tag
    graph_pool(tag)     the pool of a tag's graphs, for torch.cuda.graph(pool=)

Move it (without tags: every tag):

    pause(tags)         takes their memory off the device
    resume(tags)        brings it back
    paused(tags)        a `with` block: paused inside, and back afterwards
    swap(pause, resume) pauses some tags while it resumes others
    prepare(tags)       takes the host memory of the next pause ahead of time
    trim(tags)          gives up the memory of dead tensors
    promote(tags)       moves memory from the host to the device
    demote(tags)        moves memory from the device to the host
    on(event, tag, f)   calls a function around pauses and resumes
    share(tensor)       lets other processes use its memory
    attach(shared)      the tensor that another process shares
    hand_over(...)      a swap of two processes
    keep(tensor)        keeps its memory on the device through pauses
    safe_point()        does what other processes ask for (`ebbtide pause PID`)
    offer_safe_points() does so after each step of torch's optimizers
    order(x)            an order for resume(order=x), made once for many resumes

Ask:

    tags()              a table of all tags
    is_paused(tag)      whether any of it is away
    where(tensor)       where its bytes are
    backup_of(tensor)   its stored bytes, as a CPU tensor
    explain(tag)        why the last pause copied its blocks
    survivors(tag)      the memory still in a tag
    outside(x)          memory of models and optimizers that is in no tag
    stats()             counters and sizes
    timeline            the newest 1,024 events
    device              where tensors must be to live in regions: "cuda", or "cpu" on the simulated device

Settings:

    configure(...)      limits and switches
    settings()          those in force

Each has a docstring of its own: `help(saver.pause)`. Importing this decides nothing. The first region chooses the
driver (`EBBTIDE_DRIVER`) and checks whether torch fits it. Under `ebbtide run --pauseable` everything that the program
allocates has a tag already.
"""

from typing import TYPE_CHECKING

from ebbtide.saver.adoption.adopt import adopt
from ebbtide.saver.operations import queries
from ebbtide.saver.operations.configuration import configure
from ebbtide.saver.operations.configuration import settings_in_force as settings
from ebbtide.saver.operations.pause_resume import pause, paused, resume
from ebbtide.saver.operations.pending import Pending
from ebbtide.saver.operations.placement import demote, promote
from ebbtide.saver.operations.prepare import Preparation, prepare
from ebbtide.saver.operations.queries import backup_of, is_paused, order, stats, tags, where
from ebbtide.saver.operations.safe_points import offer_safe_points, safe_point
from ebbtide.saver.operations.swap import hand_over, swap
from ebbtide.saver.operations.trim import trim
from ebbtide.saver.regions import startup
from ebbtide.saver.regions.graphs import cuda_graph, graph_pool
from ebbtide.saver.regions.region import disabled, region
from ebbtide.saver.sharing.share import attach, keep, share
from ebbtide.saver.sharing.shared import Shared
from ebbtide.saver.state.hooks import on
from ebbtide.saver.survey.contents import explain, survivors
from ebbtide.saver.survey.outside import outside
from ebbtide.saver.values.explanation import CopiedTensor, Explanation
from ebbtide.saver.values.order import Order
from ebbtide.saver.values.outside import Outside, OutsideTensor
from ebbtide.saver.values.progress import Progress
from ebbtide.saver.values.reports import (
    Adoption,
    Asked,
    Event,
    Held,
    Report,
    ReportRow,
    SafePoint,
    Swap,
    TagStatus,
    TagTable,
)
from ebbtide.saver.values.survivors import Survivor, Survivors
from ebbtide.saver.values.whereabouts import Whereabouts

if TYPE_CHECKING:
    device: str
    """Where tensors must be to live in regions: "cuda", or "cpu" on the simulated device."""

    timeline: list[Event]
    """The newest 1,024 events, oldest first."""

__all__ = [
    "Adoption",
    "Asked",
    "CopiedTensor",
    "Event",
    "Explanation",
    "Held",
    "Order",
    "Outside",
    "OutsideTensor",
    "Pending",
    "Preparation",
    "Progress",
    "Report",
    "ReportRow",
    "SafePoint",
    "Shared",
    "Survivor",
    "Survivors",
    "Swap",
    "TagStatus",
    "TagTable",
    "Whereabouts",
    "adopt",
    "attach",
    "backup_of",
    "configure",
    "cuda_graph",
    "demote",
    "device",
    "disabled",
    "explain",
    "graph_pool",
    "hand_over",
    "is_paused",
    "keep",
    "offer_safe_points",
    "on",
    "order",
    "outside",
    "pause",
    "paused",
    "prepare",
    "promote",
    "region",
    "resume",
    "safe_point",
    "settings",
    "share",
    "stats",
    "survivors",
    "swap",
    "tags",
    "timeline",
    "trim",
    "where",
]


if not TYPE_CHECKING:  # a checker would take any name for one of them

    def __getattr__(name: str) -> str | list[Event]:
        if name == "device":
            return startup.device_type()
        if name == "timeline":
            return queries.timeline()
        raise AttributeError(f"module 'ebbtide.saver' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


startup.introduce_program()
