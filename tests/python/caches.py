"""Memory that earlier tests left in torch's caches."""

import contextlib
import gc

import torch


def release(saver):
    """Gives all of it back, that of pools which `saver.trim` does not know as well: a request that nothing can serve
    makes torch's allocator, and the simulated device's, empty every cache."""
    gc.collect()
    saver.trim()
    with saver.region("caches"), contextlib.suppress(RuntimeError):
        torch.empty(1 << 40, dtype=torch.uint8, device=saver.device)
