"""Custom functions of autograd, for the tests of what large model support gives them."""

import torch
from lms_model import SMALL, evict_all

SIDE = 256  # 256 KiB in fp32: large enough to leave
LIMITS = [0, "1GiB"]


def seeded(*shape, device, seed=0, **options):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device).requires_grad_(False)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 3 * x * x * grad


class ReturnsSaved(torch.autograd.Function):
    """x + 0 * s in forward, whose backward returns the saved tensor itself as the gradient of x."""

    @staticmethod
    def forward(ctx, x, saved):
        ctx.save_for_backward(saved)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        (saved,) = ctx.saved_tensors
        return saved, None


class Reads(torch.autograd.Function):
    """Records what backward gets for the tensors that forward saved."""

    got = ()

    @staticmethod
    def forward(ctx, x, *saved):
        ctx.save_for_backward(*saved)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        Reads.got = list(ctx.saved_tensors)
        return grad, *(None for _ in ctx.saved_tensors)


def both_ways(lms, limit, run):
    """What `run` returns without LMS and with it; it gets a function that evicts all that can leave."""
    plain = run(lambda: None)
    with lms.enable(limit=limit, min_size=SMALL):
        return plain, run(evict_all)
