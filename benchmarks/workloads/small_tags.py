"""Where the time of a small pause goes: with a pinned backup, whole, and with parts of the work left out.

A variant saves the cost of its part. All take turns in one process. Metrics are "pause VARIANT" and "resume
VARIANT"; those of the bare calls are of one handle as large as torch's segment, and of one copy of the tensor.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from ebbtide import _core, saver

from benchmarks import device
from benchmarks import tensors as kept
from benchmarks.driver import Driver
from benchmarks.limits.driver_calls import time_calls
from benchmarks.measured import Measured, Part, Stopwatch
from benchmarks.sizes import Sizes

TAG = "small"
SAMPLES = 5  # times those of the sizes
Call = Callable[[], object]


@contextmanager
def configured(**options: bool) -> Iterator[None]:
    """These settings for the length of a `with`."""
    before = {name: saver.settings()[name] for name in options}
    saver.configure(**options)
    try:
        yield
    finally:
        saver.configure(**before)


def core_calls(tensor: torch.Tensor) -> tuple[Call, Call]:
    """The core's calls with what `saver` finds out for them: torch's free memory. No hooks, no report of `saver`'s."""
    (segment,) = _core.allocations(TAG)
    start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    around = [(segment.address, start - segment.address), (end, segment.address + segment.size_bytes - end)]
    unused = [(address, size) for address, size in around if size]

    def pause() -> object:
        return _core.pause([TAG], unused=unused, unused_as_of=_core.last_lease())

    def resume() -> object:
        return _core.resume([TAG], unused=unused, unused_as_of=_core.last_lease())

    return pause, resume


def time_both(measured: Measured, variant: str, tensor: torch.Tensor, pause: Call, resume: Call) -> None:
    kept.change([tensor])
    before = kept.words(tensor).clone()
    for metric, call in ((f"pause {variant}", pause), (f"resume {variant}", resume)):
        device.synchronize()
        watch = Stopwatch()
        call()
        device.synchronize()
        measured.add(metric, *watch.stop())
    if not torch.equal(kept.words(tensor), before):
        measured.faults.append(f"{variant}: the bytes changed")


def time_nothing(measured: Measured) -> None:
    """A pause of a paused tag, and a resume of a resident one: the call alone."""
    saver.pause(TAG)
    watch = Stopwatch()
    saver.pause(TAG)
    measured.add("pause of what is paused", *watch.stop())
    saver.resume(TAG)
    watch = Stopwatch()
    saver.resume(TAG)
    measured.add("resume of what is resident", *watch.stop())


def time_bare(measured: Measured, driver: Driver, segment_bytes: int, host: torch.Tensor, tensor: torch.Tensor) -> None:
    claim_seconds, give_seconds = time_calls(driver, [segment_bytes])
    watch = Stopwatch()
    driver.copy_to_host(host.data_ptr(), tensor.data_ptr(), tensor.nbytes)
    measured.add("pause by bare calls", give_seconds + watch.stop()[0])
    watch = Stopwatch()
    driver.copy_to_device(tensor.data_ptr(), host.data_ptr(), tensor.nbytes)
    device.synchronize()
    measured.add("resume by bare calls", claim_seconds + watch.stop()[0])


def measure(sizes: Sizes, size_bytes: int) -> Measured:
    measured = Measured(bytes=size_bytes)
    with saver.region(TAG, backup="pinned"):
        (tensor,) = kept.make(kept.equal_shapes(1, size_bytes))
    kept.fill([tensor])
    host = torch.empty(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=device.is_gpu())
    (segment,) = _core.allocations(TAG)
    driver = Driver()
    core_pause, core_resume = core_calls(tensor)

    def pause() -> object:
        return saver.pause(TAG)

    def resume() -> object:
        return saver.resume(TAG)

    variants: Mapping[str, Mapping[str, bool]] = {
        "whole": {},
        "without digests": {"skip_clean": False, "skip_constant": False},
        "without looking at torch": {"skip_unused": False},
    }
    for turn in range(1 + SAMPLES * sizes.samples):
        found = Measured()
        for variant, options in variants.items():
            with configured(**options):
                time_both(found, variant, tensor, pause, resume)
        time_both(found, "in the core alone", tensor, core_pause, core_resume)
        time_nothing(found)
        time_bare(found, driver, segment.size_bytes, host, tensor)
        if turn:  # the first of each is not like the others
            measured.merge(found)
    measured.bytes = size_bytes
    return measured


def parts(sizes: Sizes) -> list[Part]:
    return [Part(f"small_tags.ebbtide_{size}", partial(measure, size_bytes=size)) for size in sizes.small_tag_bytes]
