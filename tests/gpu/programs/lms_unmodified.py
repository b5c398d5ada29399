"""Trains a model that knows nothing of ebbtide: activations, weights, gradients and states each need a part of the
device. Prints the losses, one a line. Arguments: depth, width, batch."""

import sys

import torch

torch.use_deterministic_algorithms(True, warn_only=True)


def main() -> None:
    depth, width, batch = map(int, sys.argv[1:])
    torch.manual_seed(0)
    layers = ((torch.nn.Linear(width, width), torch.nn.GELU(), torch.nn.LayerNorm(width)) for _ in range(depth))
    model = torch.nn.Sequential(*(part for block in layers for part in block)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    for _ in range(5):
        optimizer.zero_grad()
        loss = model(torch.randn(batch, width, device="cuda")).pow(2).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        print(loss.item().hex(), flush=True)
    print(torch.cuda.max_memory_reserved(), flush=True)


if __name__ == "__main__":
    main()
