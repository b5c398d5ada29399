"""The benchmark's records of JAX and its preallocation. Programs stand in for JAX, which is not installed here."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

pytestmark = pytest.mark.sim_only  # on a GPU, the benchmark itself is run


@pytest.fixture(autouse=True)
def importable(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(root)


SAID = (
    "ebbtide: summary of python (PID 7): at most 2 GiB on device 0; 3.6 GiB of 2 allocations went to the host, "
    "0 bytes were promoted"
)


def figures(held_bytes: int, refusal: str = "", is_right: bool = True) -> dict[str, Any]:
    return {"pool_bytes": 12, "held_bytes": held_bytes, "refusal": refusal, "is_right": is_right}


def outcome(said: list[str], found: dict[str, Any], status: int = 0) -> Any:
    from benchmarks.unmodified import Outcome

    return Outcome(found, said, status, "its end", 2.04)


def test_what_went_to_the_host_is_read_from_the_summary() -> None:
    from benchmarks.unmodified import spilled_bytes

    assert spilled_bytes(["ebbtide: something else", SAID]) == int(3.6 * (1 << 30))
    assert spilled_bytes(["ebbtide: summary of python (PID 7): no device memory; nothing overflowed to the host"]) == 0
    assert spilled_bytes(["ebbtide: something else"]) is None


def test_figures_are_the_last_object_of_what_was_printed() -> None:
    from benchmarks.unmodified import figures_in

    assert figures_in('{"stage": 1}\n{"stage": 2}\nsome words\n17\n{"stage": ') == {"stage": 2}
    assert figures_in("") == {} == figures_in("words")


def test_a_program_that_takes_too_long_is_ended_and_leaves_what_it_had_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import unmodified

    code = "import time; print('{\"stage\": 1}', flush=True); time.sleep(600)"
    run = subprocess.run
    monkeypatch.setattr(unmodified.subprocess, "run", lambda _, **rest: run([sys.executable, "-c", code], **rest))
    ran = unmodified.start("jax_arrays", None, timeout_seconds=2)
    assert (ran.figures, ran.status, ran.last_words) == ({"stage": 1}, -9, "; took longer than 2 s")
    assert 2 <= ran.seconds < 60


def test_facts_say_how_jax_ended() -> None:
    from benchmarks.workloads.jax_preallocation import facts_of

    done = facts_of(outcome([SAID], figures(24)), 24)
    assert (done["has_finished"], done["pool_bytes"], done["seconds"]) == (True, 12, 2.0) and "last_words" not in done
    assert done["host_bytes"] == int(3.6 * (1 << 30))
    for ran in (
        outcome([], figures(16, "XlaRuntimeError: RESOURCE_EXHAUSTED")),
        outcome([], figures(24, is_right=False)),
        outcome([], figures(24), status=-9),
        outcome([], {}, status=1),
    ):
        facts = facts_of(ran, 24)
        assert facts["has_finished"] is False and facts["host_bytes"] is None
        assert facts.get("last_words", "") == ("its end" if ran.status else "")


def test_the_workload_puts_the_three_reports_together(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    from benchmarks import device
    from benchmarks.sizes import Sizes
    from benchmarks.workloads import jax_preallocation

    started: list[tuple[Any, ...]] = []

    def start(program: str, options: dict[str, Any], timeout: float, _: Any, **arguments: int) -> Any:
        started.append((program, options["report"], timeout, arguments["count"]))
        return outcome([SAID], figures(24 << 20, is_right=options["report"] != "total"))

    monkeypatch.setattr(device, "is_gpu", lambda: True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: True)
    monkeypatch.setattr(jax_preallocation.unmodified, "start", start)
    measured = jax_preallocation.measure(Sizes.small())
    assert sorted(started) == [("jax_arrays", report, 60, 24) for report in ("device", "free", "total")]
    finished = [measured.facts[f"{report} has_finished"] for report in jax_preallocation.REPORTS]
    assert finished == [True, True, False]
    assert measured.faults == ["total: an array's content was wrong"]
    (part,) = jax_preallocation.parts(Sizes())
    assert part.least_seconds > jax_preallocation.TIMEOUT_SECONDS


def test_the_program_says_after_each_stage_what_it_knows(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks.programs import jax_arrays

    class Array(int):
        nbytes = 8

        def block_until_ready(self) -> "Array":
            return self

        def max(self) -> int:
            return int(self)

        def __mul__(self, other: int) -> "Array":
            return Array(int(self) * other)

        def __add__(self, other: int) -> "Array":
            return Array(int(self) + other)

    class Device:
        platform = "gpu"

        def memory_stats(self) -> dict[str, int]:
            return {"pool_bytes": 24, "bytes_limit": 30}

    class Jax:
        room = 3

        class numpy:  # noqa: N801
            float32 = None

            @staticmethod
            def full(_: tuple[int], number: int, __: None) -> Array:
                if number >= Jax.room:
                    raise RuntimeError("RESOURCE_EXHAUSTED: no room\nmore words")
                return Array(number)

        @staticmethod
        def jit(function: Any) -> Any:
            return function

        @staticmethod
        def devices() -> list[Device]:
            return [Device()]

    def run(count: int) -> list[dict[str, Any]]:
        monkeypatch.setattr(sys, "argv", ["jax_arrays", json.dumps({"array_bytes": 8, "count": count})])
        jax_arrays.main()
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    monkeypatch.setitem(sys.modules, "jax", Jax)
    *_, last = run(3)
    assert list(last["stage_seconds"]) == ["import", "start", "first_array", "arrays", "check", "exit"]
    assert (last["held_bytes"], last["refusal"], last["is_right"], last["platform"]) == (24, "", True, "gpu")
    assert (last["pool_bytes"], last["pool_limit_bytes"]) == (24, 30)
    lines = run(4)
    assert list(lines[-1]["stage_seconds"]) == ["import", "start", "first_array", "refusal", "exit"]
    assert lines[-1]["refusal"] == "RuntimeError: RESOURCE_EXHAUSTED: no room" and lines[-1]["held_bytes"] == 24
    assert len(lines) == 5 and lines[0]["held_bytes"] == 0
