"""A random walk over the whole public interface of `ebbtide.saver`, compared with a plain model.

    python -m tests.walk --steps 100000 --seed 7      # from the repository's root, with ebbtide installed
    python -m tests.walk.ci                            # the walks of CI
    python -m tests.walk.planted                       # each planted fault is found by the walks of CI

The walk is a state machine of hypothesis (`machine.py`). One step is one operation. Its arguments are drawn from a seed
and from the model. It runs, and then everything that the model knows is compared with the real state. Hypothesis
shortens a walk that fails. The operations are the files of `ops/`; a new feature joins the walk by a file there.

On a GPU (EBBTIDE_TEST_DRIVER=cuda) there are no driver faults, no forks, and no memory of other processes.
"""
