"""One rank of torchrun over NCCL: reduces, pauses and resumes torch's memory, and reduces before, between and after.

Run under `ebbtide run --pauseable`.
"""

import os

import torch
import torch.distributed as dist
from ebbtide import saver

COUNT = 16 << 20

rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", rank)
torch.cuda.set_device(device)
dist.init_process_group("nccl")


def reduce_and_check(seed: int) -> None:
    values = torch.full((COUNT,), float(seed + rank), device=device)
    dist.all_reduce(values)
    low, high = torch.aminmax(values)
    assert low.item() == high.item() == 2 * seed + 1, (rank, seed, low, high)


reduce_and_check(1)
weights = torch.arange(COUNT, device=device) + rank
for cycle in range(3):
    torch.cuda.synchronize()
    free_bytes = torch.cuda.mem_get_info(device)[0]
    report = saver.pause("default")
    assert report.bytes >= weights.nbytes, report
    assert torch.cuda.mem_get_info(device)[0] >= free_bytes + report.bytes // 2
    reduce_and_check(10 + cycle)  # NCCL's own buffers have not left
    saver.resume("default")
    assert torch.equal(weights, torch.arange(COUNT, device=device) + rank)
    reduce_and_check(20 + cycle)
dist.barrier()
dist.destroy_process_group()
os.write(1, f"rank {rank} is right\n".encode())  # one call, so that the lines of the two ranks do not mix
