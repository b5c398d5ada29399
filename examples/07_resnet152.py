"""Trains ResNet-152 in less device memory than it needs: what autograd saves for backward leaves the device meanwhile.

The losses are bit for bit those of training without a limit, which --compare shows. The images are random, or those of
a folder with one sub-folder for each class, as .pt files that hold a uint8 tensor (3, height, width) each.

    python examples/07_resnet152.py --compare
    python examples/07_resnet152.py --limit 16GiB --batch 256 --pixels 224 --blocks 3,8,36,3 --width 64

The second line is for a GPU: an H200 trains 203 images a second so, and 986 without a limit, which takes 51 GB.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import ebbtide
import torch
from ebbtide import saver
from torch import nn
from torch.nn import functional

CLASSES = 1000


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut; `width` channels inside, four times as many outside."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
            *(nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
            *(nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)),
        )
        is_same = stride == 1 and channels == 4 * width
        self.shortcut = (
            nn.Identity()
            if is_same
            else nn.Sequential(nn.Conv2d(channels, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.body(images) + self.shortcut(images))


def make_model(blocks: list[int], width: int) -> nn.Module:
    """A residual network; [3, 8, 36, 3] blocks of width 64 are ResNet-152."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
    layers.append(nn.MaxPool2d(3, 2, 1))
    channels = width
    for stage, count in enumerate(blocks):
        for block in range(count):
            inner = width << stage
            layers.append(Bottleneck(channels, inner, 2 if stage > 0 and block == 0 else 1))
            channels = 4 * inner
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))


def random_batches(arguments: argparse.Namespace) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """Batches of random images and labels, the same ones in each run."""
    generator = torch.Generator().manual_seed(1)
    shape = (arguments.batch, 3, arguments.pixels, arguments.pixels)
    return lambda: (
        torch.randn(shape, generator=generator),
        torch.randint(CLASSES, (arguments.batch,), generator=generator),
    )


def batches_of_folder(arguments: argparse.Namespace) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """Batches of the images in the sub-folders, resized."""
    generator = torch.Generator().manual_seed(1)
    classes = sorted(folder for folder in arguments.data.iterdir() if folder.is_dir())
    files = [(file, label) for label, folder in enumerate(classes) for file in sorted(folder.glob("*.pt"))]
    if not files:
        raise SystemExit(f"{arguments.data} has no sub-folders with .pt files")

    def load() -> tuple[torch.Tensor, torch.Tensor]:
        chosen = [files[i] for i in torch.randint(len(files), (arguments.batch,), generator=generator).tolist()]
        size = (arguments.pixels, arguments.pixels)
        images = [functional.interpolate(torch.load(file)[None] / 255.0, size) for file, _ in chosen]
        return torch.cat(images), torch.tensor([label for _, label in chosen])

    return load


def train(arguments: argparse.Namespace) -> tuple[list[float], float]:
    """The losses of all steps, and images per second without the first step."""
    torch.manual_seed(0)
    model = make_model(arguments.blocks, arguments.width).to(saver.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    load = batches_of_folder(arguments) if arguments.data else random_batches(arguments)
    losses: list[float] = []
    start = time.perf_counter()
    for step in range(arguments.steps):
        images, labels = load()
        loss = functional.cross_entropy(model(images.to(saver.device)), labels.to(saver.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step == 0:
            start = time.perf_counter()
    return losses, arguments.batch * (arguments.steps - 1) / (time.perf_counter() - start)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", default="48MiB", help="the most device memory; the small network needs 66 MiB")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--pixels", type=int, default=64, help="height and width of an image")
    parser.add_argument("--blocks", default="1,1,2,1", help="in the four stages; 3,8,36,3 is ResNet-152")
    parser.add_argument("--width", type=int, default=16, help="channels of the first stage; ResNet-152 has 64")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--data", type=Path, help="a folder of images; default: random ones")
    parser.add_argument("--compare", action="store_true", help="train without a limit as well")
    arguments = parser.parse_args()
    arguments.blocks = [int(count) for count in arguments.blocks.split(",")]
    if arguments.steps < 2:
        parser.error("--steps: at least 2, since the first one is not timed")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    torch.use_deterministic_algorithms(True, warn_only=True)
    with ebbtide.lms.enable(limit=arguments.limit, min_size="256KiB"):
        losses, rate = train(arguments)
        print(f"{rate:.1f} images/s under a limit of {arguments.limit}, the last loss is {losses[-1]:.4f}")
        print(ebbtide.lms.report())
    if arguments.compare:
        expected, rate = train(arguments)
        print(f"{rate:.1f} images/s without a limit")
        assert losses == expected, (losses, expected)
        print("the same losses as without a limit")


if __name__ == "__main__":
    main()
