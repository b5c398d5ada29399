"""How much each work moves: in full on a GPU, and small, as the benchmark's test of itself."""

import dataclasses
import os
from dataclasses import dataclass

MIB, GIB = 1 << 20, 1 << 30


def usable_cores() -> int:
    """The cores that this process may run on."""
    return len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class ModelSize:
    """A Llama-like transformer and what one forward pass is given."""

    layers: int = 32
    hidden: int = 4096
    feed: int = 14336
    heads: int = 32
    key_value_heads: int = 8
    vocabulary: int = 128256
    batch: int = 2
    tokens: int = 4096


@dataclass(frozen=True)
class Sizes:
    """Sizes are bytes unless the name says otherwise.

    Attributes:
        samples: how many times each operation is timed.
        scale: of the rows of Llama-8B's matrices; 1 makes 290 tensors of 15 GiB.
        disk_scale: the same for what goes to disk.
        no_backup_tensors, no_backup_tensor_bytes: what is dropped at pause.
        link_bytes: one pinned copy.
        handle_bytes: of the driver's handles among which the best is looked for.
        curve_bytes: the sizes of the curve.
        thread_counts: of the copies.
        request_bytes, requests_in_flight: on the disk, for ebbtide and for its limit.
        activation_tokens, activation_blocks, malloc_steps, cold_steps: of allocation in a region.
    """

    samples: int = 5
    scale: float = 1.0
    disk_scale: float = 0.5
    no_backup_tensors: int = 40
    no_backup_tensor_bytes: int = GIB
    link_bytes: int = GIB
    handle_bytes: tuple[int, ...] = (32 * MIB, 64 * MIB, 128 * MIB, 256 * MIB, 512 * MIB, GIB)
    curve_bytes: tuple[int, ...] = tuple(size * MIB for size in (2, 8, 32, 128, 512, 2048, 8192, 40960))
    thread_counts: tuple[int, ...] = (1, 2, 4, 8, 14)
    request_bytes: int = 4 * MIB
    requests_in_flight: int = min(8, usable_cores())
    activation_tokens: int = 4096
    activation_blocks: int = 32
    malloc_steps: int = 200
    cold_steps: int = 10
    model: ModelSize = dataclasses.field(default_factory=ModelSize)

    @classmethod
    def small(cls, samples: int = 2) -> "Sizes":
        """Some MiB each: fits the simulated device, and says nothing about speed."""
        return cls(
            samples=samples,
            scale=0.001,
            disk_scale=0.001,
            no_backup_tensors=4,
            no_backup_tensor_bytes=8 * MIB,
            link_bytes=8 * MIB,
            handle_bytes=(2 * MIB, 8 * MIB),
            curve_bytes=(2 * MIB, 16 * MIB),
            thread_counts=(1, 2),
            requests_in_flight=2,
            activation_tokens=16,
            activation_blocks=2,
            malloc_steps=5,
            cold_steps=2,
            model=ModelSize(2, 64, 128, 4, 2, 256, 1, 16),
        )
