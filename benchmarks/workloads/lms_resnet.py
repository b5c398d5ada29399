"""ResNet-152 in less memory than it needs, deterministic: the same losses, and images per second.

The fact `cap` says what plain training does in that much memory, `images` how many a step takes.
"""

from collections.abc import Callable
from functools import partial

import torch

from benchmarks import device
from benchmarks.lms_training import Training, measure_limited, measure_plain
from benchmarks.measured import Measured, Part
from benchmarks.resnet import make_training
from benchmarks.sizes import Sizes

ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # which deterministic algorithms need


def make(sizes: Sizes) -> Training:
    torch.use_deterministic_algorithms(True, warn_only=True)
    return make_training(sizes.training.resnet)


def measure_ebbtide(sizes: Sizes) -> Measured:
    return with_images(sizes, measure_limited(sizes, partial(make, sizes), lambda _: sizes.training.resnet_limit_bytes))


def measure_without_limit(sizes: Sizes) -> Measured:
    measured = with_images(sizes, measure_plain(sizes, partial(make, sizes)))
    measured.facts["cap"] = train_capped(sizes)
    return measured


def with_images(sizes: Sizes, measured: Measured) -> Measured:
    measured.facts["images"] = sizes.training.resnet.batch
    return measured


def train_capped(sizes: Sizes) -> str:
    """Plain training in the memory of the limit: how far it comes."""
    if not device.is_gpu():
        return "not tried: on the simulated device nothing limits plain training"
    with device.Capped(sizes.training.resnet_limit_bytes):
        try:
            make(sizes).step()
            return "plain training fits"
        except torch.OutOfMemoryError:
            return "plain training is out of memory"


def parts(_: Sizes) -> list[Part]:
    measures: dict[str, Callable[[Sizes], Measured]] = {"plain": measure_without_limit, "ebbtide": measure_ebbtide}
    return [Part(f"lms_resnet.{who}", measure, environment=ENVIRONMENT) for who, measure in measures.items()]
