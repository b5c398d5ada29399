"""The parts of the benchmark: checks that find planted faults, and processes that fail."""

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.sim_only  # on a GPU, the benchmark itself is run


@pytest.fixture(autouse=True)
def importable(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(root)


# --- checks -----------------------------------------------------------------------------------------------------------


def test_sums_see_one_bit_and_a_changed_order(saver) -> None:
    from benchmarks.tensors import Checker

    checker = Checker()
    tensor = torch.zeros(64, dtype=torch.bfloat16, device=saver.device)
    sums = {checker.sums([tensor])[0]}
    tensor[3] = 1
    sums.add(checker.sums([tensor])[0])
    sums.add(checker.sums([tensor.roll(4)])[0])
    assert len(sums) == 3


def test_changing_changes_every_word_and_a_tenth_is_a_tenth(saver) -> None:
    from benchmarks import tensors as kept

    shapes = kept.llama_shapes(0.001)
    tensors = kept.make(shapes)
    kept.fill(tensors)
    before = [kept.words(tensor).clone() for tensor in tensors]
    kept.change(tensors)
    assert all(bool((kept.words(tensor) != old).all()) for tensor, old in zip(tensors, before, strict=True))
    chosen = kept.every_tenth(tensors)
    assert len(tensors) == 290 and len(chosen) == 29
    assert 0.08 < sum(tensor.nbytes for tensor in chosen) / kept.size_of(shapes) < 0.12
    assert kept.size_of(kept.llama_shapes()) >> 30 == 14  # 14.96 GiB


def test_a_cycle_finds_what_a_keeper_does_wrong(saver, tag: str) -> None:
    from benchmarks import device
    from benchmarks import tensors as kept
    from benchmarks.cycles import Cycle
    from benchmarks.keepers import Ebbtide
    from benchmarks.measured import Measured

    class Faulty(Ebbtide):
        fault = ""

        def pause(self) -> None:
            if self.fault != "stays":
                super().pause()

        def resume(self) -> None:
            if self.fault != "stays":
                super().resume()
            if self.fault == "bit":
                kept.words(self.tensors[1])[7] ^= 1
            if self.fault == "address":
                self.tensors[0] = self.tensors[0].clone()

    size_bytes = max(4 << 20, device.allowance_bytes(4 << 20))

    def found(fault: str, **policy: Any) -> str:
        keeper = Faulty(f"{tag}-{fault}", **policy)
        keeper.fault = fault
        measured = Measured()
        Cycle(keeper, kept.equal_shapes(4, size_bytes)).run(measured)
        return "; ".join(measured.faults)

    assert found("") == ""
    assert "more were free" in found("stays")
    assert found("bit") == "a tensor's bytes changed"
    assert found("address") == "an address changed"
    assert found("none", backup=None) == ""
    assert found("bit", backup=None) == "what had no backup did not come back as zeros"


def test_a_report_that_copied_less_is_a_fault() -> None:
    from ebbtide.saver import Report

    from benchmarks.keepers import Ebbtide

    keeper = Ebbtide()
    keeper.tensors = [torch.zeros(1 << 20, dtype=torch.bfloat16)]
    whole = Report("pause", bytes=2 << 20, copied=2 << 20)
    for reports, words in (
        ([whole, whole], ""),
        ([whole, Report("resume", bytes=2 << 20, copied=1)], "were copied where"),
        ([Report("pause", bytes=1 << 20, copied=2 << 20), whole], "pause and resume speak of"),
    ):
        keeper._reports = reports
        faults = keeper.faults()
        assert bool(faults) == bool(words) and words in "".join(faults)


def test_growth_over_the_cycles_is_a_fault() -> None:
    from benchmarks.workloads.hidden_costs import find_growth, memory

    before = memory()
    assert find_growth(before, before) == []
    for name in before:
        assert find_growth(before, {**before, name: before[name] + (64 << 20)}) == [f"{name} grew by {64 << 20} bytes"]


def test_what_is_known_of_a_storage_ends_with_it() -> None:
    """The memory of a dead one is soon that of another: the baseline's losses were wrong for that."""
    from benchmarks.baselines.offload_hooks import KnownStorages

    known, memory = KnownStorages(), bytearray(4096)
    first = torch.frombuffer(memory, dtype=torch.uint8)
    known.note(first.untyped_storage(), "first")
    assert known.find(first[100:].untyped_storage()) == "first"
    address = first.data_ptr()
    del first
    later = torch.frombuffer(memory, dtype=torch.uint8)
    assert later.data_ptr() == address and known.find(later.untyped_storage()) is None
    known.note(later.untyped_storage(), "later")
    assert known.find(later.untyped_storage()) == "later"


def test_segments_are_cut_as_torch_cuts_them() -> None:
    from benchmarks.driver import segments_of

    mib = 1 << 20
    segments, places = segments_of([8192, 8192, 8 * mib, 8 * mib, 8 * mib, 33 * mib])
    assert segments == [2 * mib, 20 * mib, 20 * mib, 34 * mib]
    assert places == [(0, 0), (0, 8192), (1, 0), (1, 8 * mib), (2, 0), (3, 0)]


def test_bare_calls_take_one_size_a_turn_while_the_tensors_are_away(saver, tag: str) -> None:
    from benchmarks import tensors as kept
    from benchmarks.cycles import Cycle, repeat
    from benchmarks.keepers import Ebbtide
    from benchmarks.limits.driver_calls import BareCalls
    from benchmarks.sizes import Sizes

    sizes = Sizes.small(samples=2)
    bare = BareCalls(16 << 20, sizes)
    away: list[bool] = []

    def take_turn(measured: Any) -> None:
        bare.take_turn(measured)
        away.append(saver.is_paused(tag))

    cycle = Cycle(Ebbtide(tag, backup=None), kept.equal_shapes(2, 8 << 20), kept.change, 0, while_paused=take_turn)
    measured = repeat(cycle, sizes, 4)
    assert away == [True] * 5
    counts = {
        metric: len(seconds) for metric, seconds in measured.seconds.items() if metric.startswith(("claim", "give"))
    }
    assert counts == {"claim 2 MiB": 2, "give 2 MiB": 2, "claim 8 MiB": 2, "give 8 MiB": 2}
    assert not measured.faults


def test_a_failed_driver_call_is_an_error(saver) -> None:
    from benchmarks.driver import Driver, DriverCallError

    with pytest.raises(DriverCallError, match="cuMemUnmap answered 1"):
        Driver().unmap(0, 2 << 20)


def test_a_short_request_on_disk_is_an_error(tmp_path: Path) -> None:
    import mmap

    from benchmarks.limits.direct_io import run_requests
    from benchmarks.sizes import Sizes

    sizes = Sizes.small()
    with (tmp_path / "short").open("wb+") as file, pytest.raises(OSError, match="moved 0"):
        run_requests(sizes, sizes.request_bytes, [mmap.mmap(-1, sizes.request_bytes)], file.fileno(), os.preadv)


# --- processes --------------------------------------------------------------------------------------------------------


def skip() -> dict[str, Any]:
    from benchmarks.measured import SkippedError

    raise SkippedError("not on a Sunday")


def fail() -> dict[str, Any]:
    raise LookupError("lost")


def end_badly() -> dict[str, Any]:
    """Ends the process after the result is written, as a library's exit handler may."""
    from multiprocessing.util import Finalize

    Finalize(None, os._exit, (5,), exitpriority=1)
    return {"figure": 1}


def speak_and_die() -> dict[str, Any]:
    print("last words", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def leave_a_child(file: Path) -> dict[str, Any]:
    code = "import fcntl, sys, time; taken = open(sys.argv[1], 'w'); fcntl.flock(taken, fcntl.LOCK_EX); time.sleep(60)"
    subprocess.run([sys.executable, "-c", code, str(file)], check=True)
    return {}


def environment() -> dict[str, Any]:
    return {"value": os.environ["EBBTIDE_COPY_THREADS"], "is_fresh": "ebbtide" not in sys.modules}


def test_a_process_that_is_late_takes_those_along_that_it_has_started(tmp_path: Path) -> None:
    from benchmarks import isolation

    file = tmp_path / "locked"
    assert isolation.run(partial(leave_a_child, file), {}, 10)["reason"].startswith("took longer than 10 s")
    begin = time.monotonic()
    with file.open() as locked:  # it was there
        fcntl.flock(locked, fcntl.LOCK_EX)
    assert time.monotonic() - begin < 30


def test_whatever_happens_in_a_process_comes_back_as_plain_values() -> None:
    from benchmarks import isolation

    def run(function: Any, timeout: float = 60) -> dict[str, Any]:
        return isolation.run(function, {}, timeout)

    assert run(partial(dict, figure=1)) == {"status": "ok", "figure": 1}
    assert run(skip) == {"status": "skipped", "reason": "not on a Sunday"}
    failed = run(fail)
    assert failed["status"] == "failed" and failed["reason"].startswith("LookupError: lost (test_benchmarks_parts.py:")
    assert run(end_badly) == {"status": "ok", "figure": 1, "exit_status": 5}
    assert run(partial(os._exit, 3))["reason"].startswith("ended with status 3 before it had a result")
    assert run(speak_and_die)["reason"] == "ended by SIGKILL before it had a result; its last words: last words"
    assert run(partial(time.sleep, 60), timeout=0.5)["reason"].startswith("took longer than 0.5 s")
    got = isolation.run(environment, {"EBBTIDE_COPY_THREADS": "3"}, 60)
    assert got == {"status": "ok", "value": "3", "is_fresh": True}


class Scripted:
    """Stands in for isolation.run and returns prepared results."""

    def __init__(self, results: Sequence[dict[str, Any]]) -> None:
        self._results = iter(results)

    def __call__(self, *_: Any) -> dict[str, Any]:
        return dict(next(self._results))


def test_a_failure_keeps_what_was_measured_and_the_other_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import isolation, runner
    from benchmarks.measured import Measured, Part
    from benchmarks.sizes import Sizes

    def good(seconds: float) -> dict[str, Any]:
        return {"status": "ok", **Measured(bytes=8, seconds={"pause": [seconds]}).to_json()}

    bad = {"status": "failed", "reason": "lost"}
    monkeypatch.setattr(isolation, "run", Scripted([good(1), good(10), good(2), bad, good(3)]))
    parts = [Part(name, Measured, is_first_only=True) for name in ("a", "b")]
    run = runner.Runner([("group", lambda _: parts)], Sizes.small(samples=3))
    assert list(run.run()) == ["a", "b", "a", "b", "a"]
    assert run.entries["a"]["seconds"] == {"pause": [1, 2, 3]} and run.entries["a"]["processes"] == 3
    assert run.entries["b"]["status"] == "failed" and run.entries["b"]["seconds"] == {"pause": [10]}
    assert runner.find_failures(run.entries) == ["b: lost"]
    entries = {name: {**good(1), "exit_status": 1} for name in ("steady.ebbtide", "steady.torch_memory_saver")}
    assert runner.find_failures(entries) == ["steady.ebbtide: its process ended with status 1 after its result"]
    entries["steady.ebbtide"] = {**good(1), "faults": ["wrong", "wrong"]}
    assert runner.find_failures(entries) == ["steady.ebbtide: wrong"]


def test_turns_of_parts_and_of_samples() -> None:
    from benchmarks.measured import Measured, Part, turns
    from benchmarks.runner import in_turns

    once, many, few = Part("once", Measured), Part("many", Measured, True), Part("few", Measured, True, processes=1)
    assert [part.name for part in in_turns([many, few, once], 3)] == ["once", "many", "few", "many", "many"]
    assert list(turns(2, 4, patience_seconds=60)) == [0, 1, 2, 3]
    assert list(turns(2, 4, patience_seconds=0)) == [0, 1]


def test_limits_come_right_before_the_first_workload_that_needs_them() -> None:
    from benchmarks.runner import choose

    names = [name for name, _ in choose(["unchanged", "disk"])]
    assert names == ["link", "steady", "device_read", "unchanged", "direct_io", "disk"]


def test_a_part_that_the_end_of_the_budget_cuts_off_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import runner
    from benchmarks.measured import Measured, Part
    from benchmarks.sizes import Sizes

    monkeypatch.setattr(runner, "measure_part", lambda *_: time.sleep(60))
    run = runner.Runner([("group", lambda _: [Part("slow", Measured)])], Sizes.small(), budget=0.5)
    monkeypatch.setattr(runner.isolation, "run", late)
    assert list(run.run()) == ["slow"]
    assert run.entries == {"slow": {"status": "left out", "reason": "not measured: out of time"}}


def test_a_part_that_needs_more_than_the_budget_has_left_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import isolation, runner
    from benchmarks.measured import Measured, Part
    from benchmarks.sizes import Sizes

    parts = [Part("long", Measured, least_seconds=100), Part("short", Measured, least_seconds=10)]
    run = runner.Runner([("group", lambda _: parts)], Sizes.small(), budget=60)
    monkeypatch.setattr(isolation, "run", Scripted([{"status": "ok", **Measured().to_json()}]))
    assert list(run.run()) == ["short"]
    assert run.entries["long"] == {"status": "left out", "reason": "not measured: out of time"}
    assert run.entries["short"]["status"] == "ok"


def late(_: Any, __: Any, timeout: float) -> dict[str, Any]:
    time.sleep(timeout + 0.01)
    return {"status": "failed", "reason": "took longer"}


def test_some_parts_of_workloads() -> None:
    from benchmarks import runner
    from benchmarks.sizes import Sizes

    sizes = Sizes.small()
    groups = runner.only_parts(runner.choose(["lms_fits", "lms_resnet"]), ["lms_fits.small_net", "lms_resnet.*"])
    made = [part.name for _, make in groups for part in make(sizes)]
    assert made == ["limits.link", "lms_fits.small_net", "lms_resnet.plain", "lms_resnet.ebbtide"]


def test_refusals_are_sentences(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks import __main__ as command
    from benchmarks import isolation

    def refuse(arguments: str, *results: dict[str, Any]) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["benchmarks", *arguments.split()])
        monkeypatch.setattr(isolation, "run", Scripted(results))
        with pytest.raises(SystemExit) as end:
            command.main()
        return int(end.value.code or 0), capsys.readouterr().err

    status, said = refuse("run --small --workloads first_pause,nonsense")
    assert status == 2 and "no such workload: nonsense; there are: first_pause" in said
    status, said = refuse("run --small --workloads steady --parts steady.*,nonsense")
    assert status == 2 and "no such part: nonsense; there are: limits.link" in said
    status, said = refuse("run --small", {"status": "failed", "reason": "no driver"})
    assert status == 1 and "ebbtide does not work here: no driver" in said
    status, said = refuse("run", {"status": "ok", "origin": {"driver": "sim"}})
    assert status == 2 and "--small" in said


def test_a_result_is_named_after_the_model_of_the_gpu() -> None:
    from benchmarks.__main__ import name_of

    names = {
        "NVIDIA H200": "h200",
        "NVIDIA H100 80GB HBM3": "h100",
        "NVIDIA GeForce RTX 4090": "4090",
        "TITAN": "titan",
    }
    for device, name in names.items():
        assert name_of({"driver": "cuda", "device": device}, False) == f"bench-{name}"
    assert name_of({"driver": "sim", "device": "ebbtide simulated"}, True) == "bench-simulated-small"
