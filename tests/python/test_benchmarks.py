"""The benchmarks run, tiny, on the device under test; their figures are not looked at here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")


@pytest.fixture
def run_benchmark(root: Path, tmp_path: Path):
    """Runs benchmarks/NAME with --out and gives what it wrote."""

    def run(name: str, *arguments: str) -> dict:
        command = [sys.executable, str(root / "benchmarks" / name), *arguments, "--out", str(tmp_path)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert result.returncode == 0, result.stdout + result.stderr
        text = (tmp_path / name).with_suffix(".json").read_text()
        written = json.loads(text)
        provenance = written["provenance"]
        assert {"device", "cuda_driver", "torch", "python", "ebbtide", "revision", "arguments"} <= provenance.keys()
        assert str(tmp_path) not in text and str(root) not in text
        return written["result"]

    return run


def test_llama_cycle(run_benchmark) -> None:
    result = run_benchmark("llama_cycle.py", "--scale", "0.001", "--cycles", "3")
    assert (result["tensors"], result["faults"], len(result["cycles"])) == (290, [], 4)
    assert result["seconds"]["pause"]["count"] == 3


def test_llama_cycle_finds_planted_faults(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(root / "benchmarks")
    import llama_cycle
    import torch

    weights = torch.arange(1, 2 * llama_cycle.CHECK_PIECE, 2)
    tensor = torch.zeros(64, dtype=torch.bfloat16)
    sums = {llama_cycle.checksum(tensor, weights)}
    tensor[3] = 1
    sums.add(llama_cycle.checksum(tensor, weights))
    sums.add(llama_cycle.checksum(tensor.roll(4), weights))
    assert len(sums) == 3

    memory = {"device_free": 1 << 30, "resident_set": 1 << 30, "host_held": 0}
    cycles = [{"memory": {"after": memory}} for _ in range(3)]
    assert llama_cycle.find_growth(cycles) == []
    for name, change in (("device_free", -1), ("resident_set", 1), ("host_held", 1)):
        grown = {"memory": {"after": {**memory, name: memory[name] + change * (64 << 20)}}}
        assert len(llama_cycle.find_growth([*cycles, grown])) == 1


def test_malloc_region(run_benchmark) -> None:
    arguments = ("--tokens", "16", "--blocks", "2", "--warm", "5", "--cold", "2")
    result = run_benchmark("malloc_region.py", *arguments)
    assert result["allocations_per_step"] == 22
    assert result["warm"]["ratio"] > 0 and result["cold"]["ratio"] > 0
