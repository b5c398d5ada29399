"""How soon a kernel may run on a tensor while the rest is still on its way: resume with wait=False.

With rests, as in no_backup.py. In half of the cycles the bare driver calls take the place of the resume: so both claim
what the same pause gave back, and are measured against each other. The resume comes after them then, and claims memory
that was given back just before: that is shown as well.
"""

import time
from functools import partial

import torch
from ebbtide import saver

from benchmarks import device
from benchmarks import tensors as kept
from benchmarks.keepers import Ebbtide
from benchmarks.limits.driver_calls import BareCalls, bytes_of_weights
from benchmarks.measured import Measured, Part, Stopwatch
from benchmarks.sizes import Sizes
from benchmarks.tensors import Checker


def run_once(
    keeper: Ebbtide,
    first: torch.Tensor,
    order: saver.Order,
    checker: Checker,
    bare: BareCalls | None,
    rest_seconds: float,
    measured: Measured,
) -> None:
    """`first_kernel`: until a kernel has read all of the first tensor; `all_bytes`: until nothing is missing. With
    `bare` its metrics, and `first_kernel_after_others`."""
    kept.change(keeper.tensors)
    expected = checker.sums(keeper.tensors)
    first_sum = kept.words(first).sum().clone()
    keeper.pause()
    device.synchronize()
    if bare is not None:
        bare.take_turn(measured)
    time.sleep(rest_seconds)

    watch = Stopwatch()
    pending = saver.resume(keeper.tag, wait=False, order=order, hold_stream=False)
    mapped_seconds = watch.stop()[0]
    pending.stream_wait(tensors=[first])
    found = kept.words(first).sum()
    device.synchronize_stream()
    first_kernel = watch.stop()
    pending.wait()
    device.synchronize()
    all_bytes = watch.stop()
    if bare is None:
        measured.add("mapped", mapped_seconds)
        measured.add("first_kernel", *first_kernel)
        measured.add("all_bytes", *all_bytes)
    else:
        measured.add("first_kernel_after_others", *first_kernel)

    if not torch.equal(found, first_sum):
        measured.faults.append("the first kernel read wrong bytes")
    if checker.sums(keeper.tensors) != expected:
        measured.faults.append("a tensor's bytes changed")


def measure(sizes: Sizes, is_small_first: bool) -> Measured:
    """The first tensor is 8 KiB (a norm), or the first that was allocated (the embedding, 1 GiB)."""
    keeper = Ebbtide(backup="ram", retain=True)
    keeper.make(kept.llama_shapes(sizes.scale))
    kept.fill(keeper.tensors)
    order = list(keeper.tensors)
    if is_small_first:
        order.insert(0, order.pop())
    handed = saver.order(order)
    measured = Measured(bytes=sum(tensor.nbytes for tensor in order), facts={"first_bytes": order[0].nbytes})
    checker = Checker()
    ignored = Measured()
    bare = BareCalls(bytes_of_weights(sizes), sizes)
    for warmed in (bare, bare, None):
        run_once(keeper, order[0], handed, checker, warmed, 0, ignored)
    for turn in range(2 * sizes.samples):
        # The other one first at each turn: whose resume the pause before gives back counts as well.
        for taken in (None, bare) if turn % 2 == 0 else (bare, None):
            run_once(keeper, order[0], handed, checker, taken, sizes.rest_seconds, measured)
    measured.faults += ignored.faults
    return measured


def parts(sizes: Sizes) -> list[Part]:
    return [
        Part("early_kernel.small_first", partial(measure, is_small_first=True)),
        Part("early_kernel.large_first", partial(measure, is_small_first=False)),
    ]
