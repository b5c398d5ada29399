"""A random walk over the whole public interface of `ebbtide.saver`, compared with a plain model.

    python -m tests.walk --steps 100000 --seed 7      # from the repository's root, with ebbtide installed
    python -m tests.walk --replay walk-7.json          # repeats the steps of a failure
    python -m tests.walk --shrink walk-7.json          # finds the shortest list of steps that still fails

One step is one operation. Its arguments are drawn from the seed and from the model. It runs, and then everything that
the model knows is compared with the real state. The operations are the files of `ops/`; a new feature joins the walk by
a file there.

On a GPU (EBBTIDE_TEST_DRIVER=cuda) there are no driver faults, no forks, and no memory of other processes.
"""
