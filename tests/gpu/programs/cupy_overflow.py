"""Plain CuPy: allocates as many bytes as the argument says in arrays of 256 MiB, computes on each and checks it.

With a second argument, "async", the arrays come from the driver's own pools (cupy.cuda.malloc_async).
"""

import sys

import cupy

PIECE_BYTES = 256 << 20

if "async" in sys.argv:
    cupy.cuda.set_allocator(cupy.cuda.malloc_async)
count = int(sys.argv[1]) // PIECE_BYTES
pieces = [cupy.full(PIECE_BYTES // 8, number, dtype=cupy.int64) for number in range(count)]
for number, piece in enumerate(pieces):
    piece *= 3
    piece += number
for number, piece in enumerate(pieces):
    low, high = int(piece.min()), int(piece.max())
    assert low == high == 4 * number, (number, low, high)
print("all is right")
