"""A training loop with a spike: for some steps the model is too wide for the device, and still trains.

What does not fit is in host memory meanwhile. The losses are bit for bit those of a run in ordinary memory. Afterwards
the narrow model is as fast as before. Each model has a tag of its own, which is trimmed once the model is gone, so that
torch's cache keeps no host memory for the next model.

    python examples/06_train_spike.py
    python examples/06_train_spike.py --width 4096 --limit 4GiB --steps 20    # for a GPU that holds 9 GiB
"""

import argparse
import gc
import time
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from ebbtide import saver
from ebbtide.sizes import format_size
from torch import nn

LAYERS = 8


@dataclass
class Phase:
    """The training of one model, of which `host_bytes` were in host memory."""

    losses: list[float]
    seconds: float
    host_bytes: int


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    width, limit = (2048, "1GiB") if saver.device == "cuda" else (256, "16MiB")
    parser.add_argument("--width", type=int, default=width, help="of the narrow model; the wide one has twice that")
    parser.add_argument("--limit", default=limit, help="of the device: the narrow model fits, the wide one does not")
    parser.add_argument("--steps", type=int, default=5, help="of each phase")
    parser.add_argument("--batch", type=int, default=64)
    return parser.parse_args()


def train(width: int, may_spill: bool, arguments: argparse.Namespace) -> Phase:
    """Makes a model, trains it in a region that may spill or in ordinary memory, and drops it."""
    losses, seconds = [], []
    torch.manual_seed(0)
    tag = f"width-{width}"
    # threads="all", because a thread of autograd allocates the gradients.
    scope = saver.region(tag, overflow="split", threads="all") if may_spill else nullcontext()
    with scope, torch.device(saver.device):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(LAYERS)))
        inputs, targets = torch.randn(2, arguments.batch, width)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
        for _ in range(arguments.steps):
            start = time.perf_counter()
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            seconds.append(time.perf_counter() - start)
        host_bytes = saver.tags()[tag].host_bytes if may_spill else 0
    return Phase(losses, min(seconds), host_bytes)


def train_with_a_spike(may_spill: bool, arguments: argparse.Namespace) -> list[Phase]:
    """Narrow, wide, narrow."""
    phases = []
    for name, width in (("before", arguments.width), ("spike", 2 * arguments.width), ("after", arguments.width)):
        phase = train(width, may_spill, arguments)
        gc.collect()
        if may_spill:
            saver.trim(f"width-{width}")  # nothing uses it any more
        print(f"{name}: width {width}, {phase.seconds * 1e3:.2f} ms a step, {format_size(phase.host_bytes)} spilled")
        phases.append(phase)
    return phases


def main() -> None:
    arguments = parse_arguments()
    print("in ordinary memory")
    expected = train_with_a_spike(False, arguments)
    print(f"with {arguments.limit} of device memory")
    saver.configure(device_limit=arguments.limit, reserve=0)
    before, spike, after = phases = train_with_a_spike(True, arguments)
    assert [phase.losses for phase in phases] == [phase.losses for phase in expected]
    assert before.host_bytes == after.host_bytes == 0 < spike.host_bytes
    print(f"a step after the spike takes {after.seconds / before.seconds:.2f} times as long as before")
    print("the same losses as in ordinary memory")


if __name__ == "__main__":
    main()
