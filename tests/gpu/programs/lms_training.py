"""What the programs of test_gpu_lms.py share: a model whose activations, states and weights can be told apart in size,
and a training of it whose losses are equal bit for bit from run to run."""

import torch
from ebbtide import lms
from ebbtide.lms import control

control.GPU_IS_TRIED = True  # these tests are the trial
torch.use_deterministic_algorithms(True, warn_only=True)

MIB = 1 << 20
SMALL = "64KiB"


def make_model(depth: int, width: int) -> torch.nn.Module:
    torch.manual_seed(0)
    blocks = ((torch.nn.Linear(width, width), torch.nn.GELU(), torch.nn.LayerNorm(width)) for _ in range(depth))
    return torch.nn.Sequential(*(part for block in blocks for part in block)).cuda()


def train(steps: int = 4, depth: int = 12, width: int = 1024, batch: int = 16384) -> list[float]:
    """The losses."""
    model = make_model(depth, width)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(batch, width, device="cuda")).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def measured(**shape: int) -> tuple[list[float], int]:
    """The losses of a training without LMS, and the most bytes that torch held for it, caches included."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    losses = train(**shape)
    held = torch.cuda.max_memory_reserved()
    torch.cuda.empty_cache()
    return losses, held


def trains_within(share: float, **shape: int) -> dict[str, int | float]:
    """Trains without LMS, and within that part of what it took, with the same losses. Returns LMS's numbers."""
    plain, needed = measured(**shape)
    limit = int(share * needed)
    with lms.enable(limit=limit, min_size=SMALL):
        torch.cuda.reset_peak_memory_stats()
        losses = train(**shape)
        numbers = lms.stats()
    assert losses == plain, (losses, plain)
    held = torch.cuda.max_memory_reserved()
    assert held <= limit, f"{held >> 20} MiB were held, {limit >> 20} allowed"
    assert numbers["host_bytes"] == 0, numbers
    return numbers
