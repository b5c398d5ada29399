"""Pauses and resumes a model in ten lines, on a GPU, or on the simulated device if torch is a CPU build."""

import torch
from ebbtide import saver

with saver.region("weights"):
    model = torch.nn.Linear(4096, 4096).to(saver.device)
before, address = model.weight.detach().cpu().clone(), model.weight.data_ptr()

print(saver.pause("weights"))  # other programs can use its device memory now
print(saver.resume("weights"))

assert torch.equal(model.weight.cpu(), before) and model.weight.data_ptr() == address
print("the same bytes at the same address")
