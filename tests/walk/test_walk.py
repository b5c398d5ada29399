"""Short walks with a few seeds, and walks with planted faults, each of which the walk must find. For a long walk, run
`python -m tests.walk --steps 100000 --seed N`."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")

from walk.planted import PLANTED

SECONDS_MAX = 900  # on a machine with much other load


def run(root, module, *arguments, **environment):
    # Runs in processes of its own: a walk pauses every tag of the process, and its device is small.
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=root,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )


@pytest.mark.device_memory
@pytest.mark.parametrize(("seeds", "copy_threads"), [((1, 3), "1"), ((2, 4), "4")])
def test_a_short_walk_agrees_with_the_model(root, tmp_path, seeds, copy_threads):
    chosen = [word for seed in seeds for word in ("--seed", str(seed))]
    save = tmp_path / "walk.json"
    result = run(root, "tests.walk", "--steps", "400", *chosen, "--save", str(save), EBBTIDE_COPY_THREADS=copy_threads)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-3000:]


@pytest.fixture(scope="module")
def said(root):
    result = run(root, "tests.walk.planted")
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.sim_only
@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_found(said, fault):
    assert PLANTED[fault][1] in said[fault]


@pytest.mark.sim_only
def test_the_same_steps_are_well_where_nothing_is_planted(said):
    assert said[""] == ""


@pytest.mark.sim_only
def test_a_failure_is_shrunk_to_what_it_needs(said):
    assert said["shrunk"] == "allocate_in_region pause look"
