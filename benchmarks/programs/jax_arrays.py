"""JAX as it comes, with its preallocation: arrays of `array_bytes` until there are `count`, all computed on.

Says how far it came; a refusal is an answer here, not a failure. Its results are printed after each stage, so that
something is known of a process that is ended.
"""

import json
import sys
import time
from typing import Any


class Stages:
    """Prints all figures whenever a stage ends."""

    def __init__(self) -> None:
        self.figures: dict[str, Any] = {"stage_seconds": {}, "held_bytes": 0, "refusal": "", "is_right": True}
        self._start = time.perf_counter()

    def end(self, name: str) -> None:
        now = time.perf_counter()
        self.figures["stage_seconds"][name] = round(now - self._start, 3)
        self._start = now
        print(json.dumps(self.figures), flush=True)


def look_at_pool(device: Any, stages: Stages) -> None:
    """The bytes that JAX has preallocated, and its limit: less than it asked for where it was refused that."""
    stats = device.memory_stats() or {}
    stages.figures |= {"pool_bytes": stats.get("pool_bytes"), "pool_limit_bytes": stats.get("bytes_limit")}


def fill_and_check(jax: Any, given: dict[str, int], stages: Stages) -> None:
    """Compiles two kernels in all, since compiling is what takes JAX's time."""
    shape = (given["array_bytes"] // 4,)
    fill = jax.jit(lambda number: jax.numpy.full(shape, number, jax.numpy.float32))
    find_largest = jax.jit(lambda array: (array * 2 + 1).max())
    arrays = []
    for number in range(given["count"]):
        arrays.append(fill(number).block_until_ready())
        stages.figures["held_bytes"] += arrays[-1].nbytes
        if number == 0:
            look_at_pool(jax.devices()[0], stages)
            stages.end("first_array")
    stages.end("arrays")
    found = [float(find_largest(array)) for array in arrays]
    stages.figures["is_right"] = found == [number * 2 + 1 for number in range(len(arrays))]


def main() -> None:
    given = json.loads(sys.argv[1])
    stages = Stages()
    import jax

    stages.end("import")
    device = jax.devices()[0]
    stages.figures["platform"] = device.platform
    stages.end("start")
    try:
        fill_and_check(jax, given, stages)
        stages.end("check")
    except Exception as error:  # JAX's own kinds differ from release to release
        stages.figures["refusal"] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        stages.end("refusal")
    look_at_pool(device, stages)
    stages.end("exit")


if __name__ == "__main__":
    main()
