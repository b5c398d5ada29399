"""JAX as it comes, with its preallocation: arrays of `array_bytes` until there are `count`, all computed on.

Says how far it came; a refusal is an answer here, not a failure.
"""

import json
import sys

import jax
import jax.numpy as jnp


def main() -> None:
    given = json.loads(sys.argv[1])
    arrays, refusal, is_right = [], "", True
    try:
        for number in range(given["count"]):
            arrays.append(jnp.full(given["array_bytes"] // 4, number, jnp.float32))
        for number, array in enumerate(arrays):
            is_right &= float((array * 2 + 1).max()) == number * 2 + 1
    except Exception as error:  # JAX's own kinds differ from release to release
        refusal = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    device = jax.devices()[0]
    stats = device.memory_stats() or {}
    answer = {
        "platform": device.platform,
        "pool_bytes": stats.get("bytes_limit"),
        "held_bytes": sum(array.nbytes for array in arrays),
        "refusal": refusal,
        "is_right": bool(is_right),
    }
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
