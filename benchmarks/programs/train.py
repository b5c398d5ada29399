"""A training script, and the three lines that pause it in the middle where `pauses` is true.

Arguments: width, layers, batch, steps (on either side of the pause), pauses.
"""

import time

import torch

from benchmarks.programs.common import answer, arguments, free_bytes, synchronize
from benchmarks.programs.mlp import Training


def sums(training: Training) -> list[int]:
    """Of every parameter's words: one bit shows."""
    return [int(weight.detach().view(torch.int32).long().sum()) for weight in training.model.parameters()]


def main() -> None:
    given = arguments()
    training = Training(given.width, given.layers, given.batch)
    figures = {"pause": [], "resume": [], "freed": 0, "is_exact": True}
    for _ in range(given.steps):
        training.step()
    if given.pauses:
        from ebbtide import saver

        for _ in range(given.pauses):
            before = sums(training)
            synchronize()
            free_before = free_bytes()
            start = time.perf_counter()
            saver.pause()
            paused = time.perf_counter()
            figures["freed"] = free_bytes() - free_before
            resumed_from = time.perf_counter()
            saver.resume()
            synchronize()
            figures["pause"].append(paused - start)
            figures["resume"].append(time.perf_counter() - resumed_from)
            figures["is_exact"] &= sums(training) == before
    for _ in range(given.steps):
        training.step()
    state_bytes = 4 * sum(parameter.nbytes for parameter in training.model.parameters())
    answer(**figures, losses=training.loss_values(), state_bytes=state_bytes)


if __name__ == "__main__":
    main()
