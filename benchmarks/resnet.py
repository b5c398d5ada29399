"""Training of the residual network of examples/07_resnet152.py on random images."""

import runpy
from pathlib import Path

import torch
from ebbtide import saver
from torch import nn
from torch.nn import functional

from benchmarks.lms_training import Training
from benchmarks.sizes import ImagesSize

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "07_resnet152.py"


def make_network(size: ImagesSize) -> nn.Module:
    make_model = runpy.run_path(str(EXAMPLE))["make_model"]
    model: nn.Module = make_model(list(size.blocks), size.width)
    return model


def make_training(size: ImagesSize) -> Training:
    torch.manual_seed(0)
    with torch.device(saver.device):
        model = make_network(size)
        images = torch.randn(size.batch, 3, size.pixels, size.pixels)
        labels = torch.randint(1000, (size.batch,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return Training(optimizer, lambda: functional.cross_entropy(model(images), labels))
