"""A training script. With "pause" as argument, three lines in the middle pause and resume everything that it holds.

Prints the losses, bit for bit. With the pause, it also prints how many more bytes were free during it.
"""

import sys

import torch
from torch import nn

torch.manual_seed(0)
with torch.device("cuda"):
    model = nn.Sequential(nn.Linear(2048, 8192), nn.GELU(), nn.Linear(8192, 2048))
    inputs, targets = torch.randn(2, 256, 2048)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)


def step():
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    return loss.item().hex()


losses = [step() for _ in range(5)]
if "pause" in sys.argv:
    before = [parameter.detach().clone().cpu() for parameter in model.parameters()]
    torch.cuda.synchronize()
    free_bytes = torch.cuda.mem_get_info()[0]
    from ebbtide import saver

    saver.pause()
    print("freed", torch.cuda.mem_get_info()[0] - free_bytes)
    saver.resume()
    assert all(torch.equal(one.cpu(), other) for one, other in zip(model.parameters(), before, strict=True))
losses += [step() for _ in range(5)]
print(" ".join(losses))
