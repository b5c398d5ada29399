"""Pause of what has not changed since it was stored, or in a tenth only. Host memory is kept, as in steady.py.

With rests, and the bare driver calls while the tensors are away, as in no_backup.py.
"""

from collections.abc import Sequence
from functools import partial

import torch

from benchmarks import tensors as kept
from benchmarks.cycles import Change, Cycle, nothing, repeat
from benchmarks.keepers import Ebbtide
from benchmarks.limits.driver_calls import BareCalls, bytes_of_weights
from benchmarks.measured import Measured, Part
from benchmarks.sizes import Sizes


def change_a_tenth(tensors: Sequence[torch.Tensor]) -> None:
    """Always the same ones."""
    kept.change(kept.every_tenth(tensors))


def measure(sizes: Sizes, change: Change) -> Measured:
    keeper = Ebbtide(backup="ram", retain=True, copies_all=False)
    bare = BareCalls(bytes_of_weights(sizes), sizes)
    shapes = kept.llama_shapes(sizes.scale)
    measured = repeat(
        Cycle(keeper, shapes, change, sizes.rest_seconds, while_paused=bare.take_turn), sizes, 2 * sizes.samples
    )
    tenth = kept.every_tenth(keeper.tensors)
    measured.facts["tenth_tensors"] = len(tenth)
    measured.facts["tenth_bytes"] = sum(tensor.nbytes for tensor in tenth)
    return measured


def parts(sizes: Sizes) -> list[Part]:
    return [
        Part("unchanged.ebbtide", partial(measure, change=nothing)),
        Part("unchanged.tenth_changed", partial(measure, change=change_a_tenth)),
    ]
