"""Small runs of the benchmarks on the simulated device. The figures are not checked."""

import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("torch")

pytestmark = pytest.mark.sim_only  # on a GPU, the benchmark itself is run and checks its results

# Workloads that start programs. Each group takes less time than a test may take on a GPU machine. Workloads that need a
# new process for each sample take one sample here; `first_pause` covers combining several.
PROGRAM_WORKLOADS = (("run_spike",), ("run_generate",), ("run_overhead",), ("run_pauseable", "jax_preallocation"))
SAMPLES = {"run_overhead": "1"}


class Run(NamedTuple):
    status: int
    output: str
    file: Path
    text: str

    @property
    def result(self) -> dict:
        return json.loads(self.text)["result"]


@pytest.fixture(scope="module")
def run_module(root: Path):
    """Runs `python -m MODULE ARGUMENTS` in the root of the repository."""

    def run(module: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", module, *arguments]
        variables = {**os.environ, **environment}
        return subprocess.run(
            command, cwd=root, env=variables, capture_output=True, text=True, timeout=600, check=False
        )

    return run


@pytest.fixture(scope="module")
def workloads(root: Path) -> str:
    """All workloads except those that start programs, which have tests of their own."""
    sys.path.insert(0, str(root))
    try:
        from benchmarks import catalogue
    finally:
        sys.path.remove(str(root))
    apart = {*catalogue.ON_DEMAND, *itertools.chain(*PROGRAM_WORKLOADS)}
    return ",".join(name for name in catalogue.WORKLOADS if name not in apart)


@pytest.fixture(scope="module")
def whole(run_module, workloads: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One small run of these workloads."""
    folder = tmp_path_factory.mktemp("bench")
    done = run_module("benchmarks", "run", "--small", "--workloads", workloads, "--out", str(folder))
    (file,) = folder.glob("*.json")
    return Run(done.returncode, done.stdout + done.stderr, file, file.read_text())


def assert_every_check_held(run: Run) -> None:
    measured = run.result["measured"]
    failed = {name: entry["reason"] for name, entry in measured.items() if entry["status"] == "failed"}
    assert failed == {}
    assert {name: entry["faults"] for name, entry in measured.items() if entry.get("faults")} == {}
    assert run.status == 0, run.output


def test_every_part_runs_and_every_check_holds(whole: Run) -> None:
    assert_every_check_held(whole)


@pytest.mark.parametrize("group", PROGRAM_WORKLOADS, ids="-".join)
def test_programs_run_plainly_and_under_ebbtide(run_module, group: tuple[str, ...], tmp_path: Path) -> None:
    samples = SAMPLES.get(group[0], "2")
    done = run_module(
        "benchmarks", "run", "--small", "--workloads", ",".join(group), "--samples", samples, "--out", str(tmp_path)
    )
    (file,) = tmp_path.glob("*.json")
    assert_every_check_held(Run(done.returncode, done.stdout + done.stderr, file, file.read_text()))


def test_by_default_all_workloads_run_but_those_on_demand(run_module, workloads: str, tmp_path: Path) -> None:
    done = run_module("benchmarks", "run", "--small", "--budget", "0", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = tmp_path.glob("*.json")
    left_out = json.loads(file.read_text())["result"]["measured"]
    expected = {*workloads.split(","), *itertools.chain(*PROGRAM_WORKLOADS)}
    assert {name.partition(".")[0] for name in left_out} - {"limits"} == expected


def test_each_row_has_its_figures_or_says_why_not(whole: Run) -> None:
    rows = whole.result["rows"]
    assert len({row["workload"] for row in rows}) >= 20
    for row in rows:
        if row["status"] == "ok":
            assert row["seconds"]["count"] >= 2 and row["seconds"]["least"] <= row["seconds"]["median"]
            assert row["bytes_per_second"] is None or row["bytes_per_second"] > 0
        else:
            assert row["reason"]
    (first, *_) = [row for row in rows if row["part"] == "first_pause.ebbtide"]
    assert [(goal["against"], goal["target"]) for goal in first["goals"]] == [("T", 8), ("L", 0.45), ("L", 0.6)]
    assert isinstance(first["goals"][1]["reached"], bool)


def test_results_say_where_they_come_from_and_nothing_of_the_machine_s_folders(whole: Run, root: Path) -> None:
    document = json.loads(whole.text)
    origin = document["provenance"]
    assert {"device", "cuda_driver", "torch", "python", "ebbtide", "revision", "arguments"} <= origin.keys()
    assert origin["arguments"]["small"] is True
    assert str(root) not in whole.text and str(whole.file.parent) not in whole.text
    assert document["result"]["measured"]["malloc.ebbtide"]["facts"]["allocations_per_step"] == 22
    assert document["result"]["measured"]["first_pause.ebbtide"]["processes"] == 2
    assert whole.file.name.endswith("-small.json")


def test_the_table_shows_limits_rows_and_facts(whole: Run, run_module) -> None:
    shown = run_module("benchmarks", "table", str(whole.file))
    assert shown.returncode == 0, shown.stderr
    for words in (
        "limits.link",
        "first pause",
        "limits.direct_io",
        "import without torch",
        "device_bytes_of_our_own",
        "malloc and free, warm",
    ):
        assert words in shown.stdout and words in whole.output


def test_baselines_that_need_a_gpu_are_left_out_with_the_reason(whole: Run) -> None:
    entry = whole.result["measured"]["first_pause.plain_copy"]
    assert entry["status"] == "skipped" and "needs a GPU" in entry["reason"]
    assert "left out: first_pause.plain_copy" in whole.output
    assert whole.result["measured"]["first_pause.vllm_sleep"]["status"] == "ok"


@pytest.mark.expected_skip("matplotlib is only needed for the plots")
def test_plots_are_drawn_from_the_json(whole: Run, run_module, root: Path) -> None:
    pytest.importorskip("matplotlib")
    on_demand = root / "benchmarks/results/lms_programs-h200.json"
    drawn = run_module("benchmarks", "plots", str(whole.file), str(on_demand), "--out", str(whole.file.parent))
    assert drawn.returncode == 0, drawn.stderr
    for stem, name in ((whole.file.stem, "bars"), (whole.file.stem, "sizes"), (on_demand.stem, "training")):
        assert "<svg" in whole.file.with_name(f"{stem}-{name}.svg").read_text()


def test_chosen_workloads_bring_what_they_are_compared_with(run_module, tmp_path: Path) -> None:
    done = run_module(
        "benchmarks",
        "run",
        "--small",
        "--workloads",
        "malloc",
        "--no-baselines",
        "--samples",
        "3",
        "--out",
        str(tmp_path),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = tmp_path.glob("*.json")
    measured = json.loads(file.read_text())["result"]["measured"]
    assert set(measured) == {"limits.link", "malloc.ebbtide"}
    assert len(measured["limits.link"]["seconds"]["both"]) == 6


def test_what_no_time_is_left_for_is_said_to_be_left_out(run_module, tmp_path: Path) -> None:
    done = run_module(
        "benchmarks", "run", "--small", "--workloads", "disk,malloc", "--budget", "0", "--out", str(tmp_path)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = tmp_path.glob("*.json")
    assert {entry["status"] for entry in json.loads(file.read_text())["result"]["measured"].values()} == {"left out"}
    assert "left out: disk.ebbtide: not measured: out of time" in done.stdout
    assert "not measured: limits.link, limits.direct_io, disk.ebbtide, malloc.ebbtide\n" in done.stdout


def test_a_signal_ends_a_run_with_what_there_is(root: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "benchmarks",
        "run",
        "--small",
        "--workloads",
        "steady,malloc",
        "--out",
        str(tmp_path),
    ]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("limits.link: ok"):
                process.send_signal(signal.SIGTERM)
                break
        output = process.stdout.read()
        assert process.wait() == 1
    (file,) = tmp_path.glob("*.json")
    measured = json.loads(file.read_text())["result"]["measured"]
    assert measured["limits.link"]["status"] == "ok"
    assert measured["malloc.ebbtide"] == {"status": "left out", "reason": "not measured: stopped by a signal"}
    assert "limits of this machine" in output and "every check held" in output


def test_runs_are_merged_into_one_table(whole: Run, workloads: str, run_module, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    done = run_module("benchmarks", "run", "--small", "--workloads", "copy_tuning", "--out", str(other))
    assert done.returncode == 0, done.stdout + done.stderr
    merged = run_module("benchmarks", "merge", str(whole.file), str(other), "--out", str(tmp_path / "merged.json"))
    assert merged.returncode == 0, merged.stdout + merged.stderr
    document = json.loads((tmp_path / "merged.json").read_text())
    assert [run["arguments"]["workloads"] for run in document["provenance"]["runs"]] == [workloads, "copy_tuning"]
    measured = document["result"]["measured"]
    assert [measured[name]["run"] for name in ("malloc.ebbtide", "limits.link", "copy_tuning.2")] == [0, 1, 1]
    assert "first pause" in merged.stdout
    again = run_module("benchmarks", "merge", str(tmp_path / "merged.json"), str(other), "--out", str(tmp_path))
    assert again.returncode == 2 and "one of these is merged already: give the runs themselves" in again.stderr
