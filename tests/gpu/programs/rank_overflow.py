"""One rank of torchrun: allocates as many bytes as the argument says, waits for the other rank, and checks.

Prints how much its own ledger entry holds on the host, and whether it was refused memory.
"""

import os
import sys

import torch
import torch.distributed as dist
from ebbtide import saver

PIECE_BYTES = 256 << 20

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.cuda.set_device(0)
pieces, is_refused = [], False
try:
    for number in range(int(sys.argv[1]) // PIECE_BYTES):
        pieces.append(torch.full((PIECE_BYTES // 8,), number + rank, dtype=torch.int64, device="cuda"))
except torch.OutOfMemoryError:
    is_refused = True
dist.barrier()  # both hold all that they could get
held = torch.tensor([saver.stats()["host_bytes"]])
dist.all_reduce(held)
count = len(pieces)
if is_refused:
    pieces.pop()  # makes room for the computation
for number, piece in enumerate(pieces):
    low, high = torch.aminmax(piece.mul_(3))
    assert low.item() == high.item() == 3 * (number + rank)
dist.barrier()
line = f"rank {rank}: {count} pieces, refused {is_refused}, together {held.item()} bytes on the host\n"
os.write(1, line.encode())  # one call, so that the lines of the two ranks do not mix
dist.destroy_process_group()
