"""Trains a model, then a wider one, then the first one again. Arguments: narrow, wide, layers, batch, warm_steps,
steps, wide_steps, empties_cache (torch's, after the wide one)."""

import torch

from benchmarks.programs.common import IS_GPU, answer, arguments, time_each
from benchmarks.programs.mlp import Training


def train(width: int, warm_steps: int, steps: int) -> tuple[list[float], list[float]]:
    """Seconds of each step after the warm ones, and every loss."""
    given = arguments()
    training = Training(width, given.layers, given.batch)
    time_each(range(warm_steps), training.step)
    return time_each(range(steps), training.step), training.loss_values()


def main() -> None:
    given = arguments()
    before, first_losses = train(given.narrow, given.warm_steps, given.steps)
    spike, wide_losses = train(given.wide, 1, given.wide_steps)
    if given.empties_cache and IS_GPU:
        torch.cuda.empty_cache()
    after, last_losses = train(given.narrow, given.warm_steps, given.steps)
    answer(before=before, spike=spike, after=after, losses=[first_losses, wide_losses, last_losses])


if __name__ == "__main__":
    main()
