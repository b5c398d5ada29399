"""GPU memory that leaves and comes back: ten lines. Runs on a GPU, and on the simulated device where torch has none."""

import torch
from ebbtide import saver

with saver.region("weights"):
    model = torch.nn.Linear(4096, 4096).to(saver.device)
before, address = model.weight.detach().cpu().clone(), model.weight.data_ptr()

print(saver.pause("weights"))  # its device memory is free for others now
print(saver.resume("weights"))

assert torch.equal(model.weight.cpu(), before) and model.weight.data_ptr() == address
print("the same bytes at the same address")
