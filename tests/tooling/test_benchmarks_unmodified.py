"""How the benchmark starts programs that do not use ebbtide."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def importable(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(root)


def test_options_become_the_words_of_the_command() -> None:
    from benchmarks.unmodified import to_flags

    words = to_flags({"device_limit": 4096, "overflow": "split", "summary": True})
    assert words == ["--device-limit", "4096", "--overflow", "split", "--summary"]
    assert to_flags({}) == []


TRAIN = {"width": 8, "layers": 1, "batch": 2, "steps": 1}


def test_a_program_runs_the_same_with_and_without_ebbtide() -> None:
    from benchmarks import unmodified

    plain = unmodified.run("train", None, **TRAIN, pauses=0)
    ran = unmodified.run("train", {"device_limit": "1GiB"}, **TRAIN, pauses=0)
    assert len(plain.figures["losses"]) == 2 and ran.figures["losses"] == plain.figures["losses"]
    told = [line.partition(", so ")[0] for line in ran.said]
    is_simulated = os.environ["EBBTIDE_DRIVER"] == "sim"
    assert (ran.status, told) == (0, ["ebbtide: EBBTIDE_DRIVER=sim switches the preload library off"] * is_simulated)


def test_a_program_that_fails_is_an_error_with_its_last_words() -> None:
    from benchmarks import unmodified

    outcome = unmodified.start("train", None, **TRAIN)  # an argument is missing
    assert outcome.status == 1 and outcome.figures == {}
    with pytest.raises(unmodified.ProgramError, match=r"(?s)train ended with status 1: .*no attribute 'pauses'"):
        unmodified.run("train", None, **TRAIN)
    with pytest.raises(unmodified.ProgramError, match="status 2"):
        unmodified.run("train", {"overflow": "sideways"}, **TRAIN, pauses=0)


STEPS = {"launches": 5, "allocations": 2, "allocation_bytes": 4096, "width": 8, "layers": 1, "batch": 2, "steps": 1}


@pytest.mark.parametrize("options", [None, {}])
def test_a_program_that_stays_answers_turn_by_turn(options: dict[str, object] | None) -> None:
    from benchmarks.answering import Answering

    program = Answering("small_steps", options, **STEPS)
    try:
        assert program.read() == {"ready": True}
        core = min(os.sched_getaffinity(0))
        program.pin({core})
        assert all(program.ask(word)["seconds"] > 0 for word in ("launch", "allocation", "step", "launch"))
    finally:
        program.stop()


def test_a_program_that_stays_and_fails_says_how() -> None:
    from benchmarks.answering import Answering
    from benchmarks.unmodified import ProgramError

    program = Answering("small_steps", None, **STEPS)
    assert program.read() == {"ready": True}
    with pytest.raises(ProgramError, match=r"(?s)small_steps ended with status 1: .*KeyError: 'sideways'"):
        program.ask("sideways")
    with pytest.raises(ProgramError, match="status 1"):
        program.stop()


def test_a_program_ends_with_the_process_that_started_it() -> None:
    """The test reads from a pipe that only the program holds open, so the read ends when the program does."""
    code = """
        import os, signal, subprocess, sys
        from benchmarks.unmodified import die_with_parent
        print("ready", flush=True)
        subprocess.Popen(["sleep", "600"], preexec_fn=die_with_parent)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=Path(__file__).resolve().parents[2],
        stdout=subprocess.PIPE,
        timeout=60,
        check=False,
    )
    assert done.stdout == b"ready\n"
