"""A random walk over the whole public surface of `ebbtide.saver`, held against a plain model.

    python -m tests.walk --steps 100000 --seed 7      # from the repository's root, with ebbtide installed
    python -m tests.walk --replay walk-7.json          # what a failure wrote, again
    python -m tests.walk --shrink walk-7.json          # the shortest list of steps that still fails

One step is one operation: its arguments are drawn from the seed and from the model, it runs, and then everything that
the model knows is compared with what is there. The operations are the files of `ops/`: a feature joins the walk by a
file there.

On a GPU (EBBTIDE_TEST_DRIVER=cuda) there are no driver faults, no forks, and no memory of other processes.
"""
