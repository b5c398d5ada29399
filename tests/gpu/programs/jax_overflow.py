"""Plain JAX: allocates as many bytes as the argument says in arrays of 256 MiB, computes on each and checks it."""

import sys

import jax
import jax.numpy as jnp

PIECE_BYTES = 256 << 20

assert jax.devices()[0].platform == "gpu", jax.devices()
count = int(sys.argv[1]) // PIECE_BYTES
pieces = [jnp.full(PIECE_BYTES // 4, number, jnp.float32).block_until_ready() for number in range(count)]
for number, piece in enumerate(pieces):
    low, high = (float(found) for found in (jnp.min(piece * 3 + 1), jnp.max(piece * 3 + 1)))
    assert low == high == 3 * number + 1, (number, low, high)
print("all is right")
