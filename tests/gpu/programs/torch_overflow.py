"""Plain torch: allocates as many bytes as the argument says in tensors of 256 MiB, computes on each and checks it."""

import sys

import torch

PIECE_BYTES = 256 << 20

count = int(sys.argv[1]) // PIECE_BYTES
pieces = [torch.full((PIECE_BYTES // 8,), number, dtype=torch.int64, device="cuda") for number in range(count)]
for number, piece in enumerate(pieces):
    piece.mul_(3).add_(number)
for number, piece in enumerate(pieces):
    low, high = torch.aminmax(piece)
    assert low.item() == high.item() == 4 * number, (number, low, high)
square = torch.randn(2048, 2048, device="cuda")
assert torch.allclose(square @ torch.eye(2048, device="cuda"), square, atol=1e-2)
print("all is right")
