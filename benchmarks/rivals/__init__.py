"""What a user would take instead of ebbtide: one file a rival, each a Keeper (benchmarks/keepers.py).

RIVALS says which keeper each offers for which use: a use that it lacks is left out.
"""

from collections.abc import Callable, Mapping

from benchmarks.keepers import Keeper
from benchmarks.rivals.memory_saver import MemorySaver
from benchmarks.rivals.plain_copy import PlainCopy
from benchmarks.rivals.vllm_sleep import VllmSleep
from benchmarks.sizes import Sizes

Maker = Callable[[], Keeper]

# Those that targets are held against. The others are timed less often.
COUNTED_RIVALS = ("torch_memory_saver",)

# name -> use -> how to make it. Uses: "backup" (host memory goes back at resume, if the rival can do that), "retain"
# (it is kept from cycle to cycle, if the rival can do that), "drop" (without a backup).
RIVALS: Mapping[str, Mapping[str, Maker]] = {
    "torch_memory_saver": {
        "backup": MemorySaver,
        "retain": lambda: MemorySaver(retain=True),
        "drop": lambda: MemorySaver(backup=False),
    },
    "vllm_sleep": {"backup": VllmSleep, "retain": VllmSleep, "drop": lambda: VllmSleep(backup=False)},
    "plain_copy": {"backup": PlainCopy, "retain": PlainCopy},
}


def least_samples(name: str, sizes: Sizes) -> int:
    """How often a rival, or ebbtide, is timed at least."""
    return sizes.shown_samples if name in RIVALS and name not in COUNTED_RIVALS else sizes.samples
