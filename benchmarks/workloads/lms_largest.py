"""The largest batch and the largest images of ResNet-152 that a limit allows, with large model support and without.

The result fits, and one step of the search more does not: facts `largest` and `too_large`. With large model support
the host may be full instead: `host_limit_bytes` is its limit. The metric "step" is of the largest.
"""

import gc
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import ebbtide
import torch

from benchmarks import device
from benchmarks.lms_training import time_steps
from benchmarks.measured import Measured, Part
from benchmarks.resnet import make_training
from benchmarks.sizes import ImagesSize, Sizes

STEPS = 3


def limited(sizes: Sizes, who: str) -> AbstractContextManager[Any]:
    size = sizes.training
    if who == "ebbtide":
        return ebbtide.lms.enable(
            size.resnet_limit_bytes, min_size=size.least_bytes, host_limit=size.largest_host_limit_bytes
        )
    device.need_gpu("on the simulated device nothing limits plain training")
    return device.Capped(size.resnet_limit_bytes)


def try_size(sizes: Sizes, who: str, images: ImagesSize) -> tuple[Measured, str]:
    """The steps, and why they did not fit; "" if they did."""
    measured, problem = Measured(), ""
    device.empty_cache()
    with limited(sizes, who):
        try:
            time_steps(measured, make_training(images).step, STEPS, uncounted=1)
        except torch.OutOfMemoryError as error:
            problem = "the host is full" if "host_limit" in str(error) else "the device is full"
        gc.collect()
    return measured, problem


def measure(sizes: Sizes, who: str, what: str) -> Measured:
    size = sizes.training
    number, step = size.largest_from[what]
    base = replace(size.resnet, batch=size.largest_from["batch"][0])
    best, fits, fails, problem = Measured(), 0, 0, ""
    while number > fits:
        measured, found = try_size(sizes, who, replace(base, **{what: number}))
        if found:
            fails, problem = number, found
        else:
            best, fits = measured, number
        number = (fits + fails) // 2 // step * step if fails else 2 * fits
    best.facts |= {"largest": fits, "too_large": fails, "because": problem}
    if who == "ebbtide":
        best.facts["host_limit_bytes"] = size.largest_host_limit_bytes
    return best


def parts(_: Sizes) -> list[Part]:
    return [
        Part(f"lms_largest.{who}_{what}", partial(measure, who=who, what=what))
        for what in ("batch", "pixels")
        for who in ("plain", "ebbtide")
    ]
