"""The sentences of `ebbtide run` about a wrong option or place, also where stderr is closed."""

import os
import subprocess
import sys

import pytest


def test_a_program_that_torch_memory_savers_variable_makes_pauseable_has_a_tag_and_a_backup(ebbtide_run):
    for words in (["--tag", "job"], ["--backup", "disk"], ["--pauseable-all"]):
        assert ebbtide_run(*words, "--", "true", TMS_INIT_ENABLE="1") == (0, "", ""), words
    assert ebbtide_run("--pauseable-all", "--", "true")[0] == 0  # threads of a program tag their own memory
    assert ebbtide_run("--tag", "job", "--", "true", TMS_INIT_ENABLE="0")[0] == 2


def test_a_size_that_the_environment_gives_is_named_by_its_variable(ebbtide_run):
    status, _, error = ebbtide_run("--host-limit", "1MiB", "--", "true", EBBTIDE_HOST_POOL="2MiB")
    assert status == 2 and "EBBTIDE_HOST_POOL is 2.0 MiB, and --host-limit allows 1.0 MiB" in error


def test_a_name_that_is_too_long_for_a_file_is_no_program(ebbtide_run):
    status, _, error = ebbtide_run("--", "x" * 300)
    assert status == 127 and error.splitlines()[-1].startswith("Error: there is no program 'xxx")


def test_a_ledger_from_a_folder_that_is_gone_is_refused(tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    program = f"import os, sys; os.rmdir({str(gone)!r}); os.execvp(sys.argv[1], sys.argv[1:])"
    command = [sys.executable, "-c", program, sys.executable, "-m", "ebbtide.cli", "run", "--", "/bin/true"]
    variables = {**os.environ, "EBBTIDE_LEDGER": "led", "PYTHONSAFEPATH": "1"}
    done = subprocess.run(command, cwd=gone, env=variables, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and done.stderr.startswith("Error: EBBTIDE_LEDGER=led is a path from the current")


@pytest.mark.parametrize("where", ["2>&-", "2>/dev/full", "2> >(exec <&-)"], ids=["closed", "full", "unread"])
def test_an_stderr_that_takes_nothing_ends_no_run(run_variables, where):
    """Whether or not there is something to say, as of a misspelt variable; and that goes nowhere else."""
    run = [sys.executable, "-m", "ebbtide.cli", "run", "--", "bash", "-c", "echo out; exit 5"]
    for said in ({}, {"EBBTIDE_DEVICE_LIMT": "3"}, {"EBBTIDE_SUMMARY": "1"}):
        script = f'"$@" {where}; code=$?; wait; exit $code'
        command = ["bash", "-c", script, "bash", *run]
        done = subprocess.run(
            command, env={**run_variables, **said}, capture_output=True, text=True, timeout=120, check=False
        )
        assert (done.returncode, done.stdout) == (5, "out\n"), (said, done.stderr)


@pytest.mark.parametrize("where", ["2>&-", "2>/dev/full", "2> >(exec <&-)"], ids=["closed", "full", "unread"])
def test_an_stderr_that_takes_nothing_leaves_the_status_of_a_refusal(run_variables, where, tmp_path):
    script = tmp_path / "bad"
    script.write_text("echo no interpreter is named\n")
    script.chmod(0o755)
    for words, status in ((["--", script], 126), (["--", "no-such-program"], 127), (["--bogus", "--", "true"], 2)):
        run = [sys.executable, "-m", "ebbtide.cli", "run", *map(str, words)]
        command = ["bash", "-c", f'"$@" {where}; code=$?; wait; exit $code', "bash", *run]
        done = subprocess.run(command, env=run_variables, capture_output=True, text=True, timeout=120, check=False)
        assert (done.returncode, done.stdout) == (status, ""), (words, done.stderr)
