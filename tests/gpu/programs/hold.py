"""Takes device memory until no more is free than the argument says, and holds it until standard input ends."""

import sys

import torch

left_bytes = int(sys.argv[1])
torch.cuda.init()
torch.zeros(1, device="cuda")
free_bytes = torch.cuda.mem_get_info()[0]
held = torch.empty(max(0, free_bytes - left_bytes), dtype=torch.uint8, device="cuda")
print(torch.cuda.mem_get_info()[0], flush=True)
sys.stdin.read()
