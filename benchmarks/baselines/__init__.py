"""The programs that a user would take instead of ebbtide: one file a baseline, each a Keeper (benchmarks/keepers.py).

BASELINES says which keeper each offers for which use: a use that it lacks is left out.
"""

from collections.abc import Callable, Mapping

from benchmarks.baselines.memory_saver import MemorySaver
from benchmarks.baselines.plain_copy import PlainCopy
from benchmarks.baselines.vllm_sleep import VllmSleep
from benchmarks.keepers import Keeper
from benchmarks.sizes import Sizes

Maker = Callable[[], Keeper]

# Those that targets are held against. The others are timed less often.
COUNTED_BASELINES = ("torch_memory_saver",)

# name -> use -> how to make it. Uses: "backup" (host memory goes back at resume, if the baseline can do that), "retain"
# (it is kept from cycle to cycle, if the baseline can do that), "drop" (without a backup).
BASELINES: Mapping[str, Mapping[str, Maker]] = {
    "torch_memory_saver": {
        "backup": MemorySaver,
        "retain": lambda: MemorySaver(retain=True),
        "drop": lambda: MemorySaver(backup=False),
    },
    "vllm_sleep": {"backup": VllmSleep, "retain": VllmSleep, "drop": lambda: VllmSleep(backup=False)},
    "plain_copy": {"backup": PlainCopy, "retain": PlainCopy},
}


def makers(use: str, **ours: Maker) -> dict[str, Maker]:
    """Ebbtide's keepers, then that of every baseline which offers this use."""
    return ours | {name: uses[use] for name, uses in BASELINES.items() if use in uses}


def least_samples(name: str, sizes: Sizes) -> int:
    """How often a baseline, or ebbtide, is timed at least."""
    return sizes.shown_samples if name in BASELINES and name not in COUNTED_BASELINES else sizes.samples
