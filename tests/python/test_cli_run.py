"""`ebbtide run` changes nothing about the program except its environment, and refuses invalid arguments."""

import os
import re
import signal
import struct
import subprocess
import sys
from pathlib import Path
from unittest import mock

import ebbtide
import pytest
from click.testing import CliRunner
from ebbtide.cli import main

PRINT_ARGUMENTS = "import os, sys; sys.stdout.buffer.write(b'\\0'.join(map(os.fsencode, sys.argv[1:])))"
WAIT_FOR_SIGNAL = """
import signal
asked = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1}
signal.pthread_sigmask(signal.SIG_BLOCK, asked)
print("ready", flush=True)
print(signal.sigwait(asked).name, flush=True)
"""
ADDED = {"EBBTIDE_LEDGER", "LD_PRELOAD"}


@pytest.fixture
def variables(tmp_path):
    """This process's environment without ebbtide's settings, and with a folder for ledgers of the test's own."""
    folder = tmp_path / "runtime"
    folder.mkdir()
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("EBBTIDE_", "LD_PRELOAD"))}
    return {**ours, "XDG_RUNTIME_DIR": str(folder)}


@pytest.fixture
def package():
    """The folder of the package, with its libraries."""
    return Path(ebbtide.__file__).resolve().parent


@pytest.fixture
def start(variables):
    """`ebbtide run ARGUMENTS` as a Popen with pipes. Other keywords are variables; None unsets one."""

    def start(*arguments, **environment):
        everything = {name: value for name, value in {**variables, **environment}.items() if value is not None}
        return subprocess.Popen(
            [sys.executable, "-m", "ebbtide.cli", "run", *arguments],
            env=everything,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    return start


@pytest.fixture
def run(start):
    """The same, run to its end: status, stdout, stderr."""

    def run(*arguments, given=b"", **environment):
        process = start(*arguments, **environment)
        out, error = process.communicate(given, timeout=120)
        return process.returncode, out, error.decode()

    return run


@pytest.fixture
def refused(variables):
    """`ebbtide run ARGUMENTS` in this process, which must start nothing: status, stdout, stderr."""

    def run(*arguments, **environment):
        with mock.patch.dict(os.environ, {**variables, **environment}, clear=True), mock.patch("os.execve") as start:
            done = CliRunner().invoke(main, ["run", *arguments])
        assert not start.called
        return done.exit_code, done.stdout, done.stderr

    return run


def parse_environment(out):
    return dict(entry.split(b"=", 1) for entry in out.split(b"\0") if entry)


def environment_of(result):
    status, out, error = result
    assert status == 0, error
    return {os.fsdecode(name): os.fsdecode(value) for name, value in parse_environment(out).items()}


# --- the program is as it would be without `ebbtide run` ---


@pytest.mark.parametrize("status", [0, 7, 126])
def test_the_exit_status_is_the_programs(run, status):
    assert run("--", "sh", "-c", f"exit {status}") == (status, b"", "")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_signals_reach_the_program(start, name):
    process = start("--", sys.executable, "-c", WAIT_FOR_SIGNAL)
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(getattr(signal, name))
    out, error = process.communicate(timeout=60)
    assert (process.returncode, out, error) == (0, name.encode() + b"\n", b"")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGKILL", "SIGPIPE"])
def test_a_signal_that_ends_the_program_is_its_status(start, name):
    process = start("--", "sh", "-c", "echo ready; exec cat")
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(getattr(signal, name))
    process.communicate(timeout=60)
    assert process.returncode == -getattr(signal, name)


def test_the_program_is_the_process_that_was_started(start):
    process = start("--", sys.executable, "-c", "import os; print(os.getpid(), os.getppid())")
    out, _ = process.communicate(timeout=60)
    assert out.split() == [str(process.pid).encode(), str(os.getpid()).encode()]


def test_stdin_is_the_programs_to_the_last_byte(run):
    given = bytes(range(256)) * 4096
    assert run("--", "cat", given=given) == (0, given, "")


def test_help_says_what_holds_where_nothing_is_given(run):
    status, out, _ = run("--help")
    words = " ".join(out.decode().split())
    assert status == 0
    assert "[EBBTIDE_HOST_POOL; default: 0]" in words
    assert "[EBBTIDE_SUMMARY; default: no]" in words
    assert "[EBBTIDE_RESERVE; default: 512 MiB, or a sixteenth of the device if that is less]" in words


ARGUMENTS = [
    "a b",
    "",
    "-x",
    "--help",
    "--overflow",
    "--",
    "--dry-run",
    'it\'s "quoted" $HOME * \\',
    "two\nlines",
    "ä",
    os.fsdecode(b"\xff\xfe"),
]


@pytest.mark.parametrize("before", [[], ["--"], ["--summary", "--"], ["--summary"]])
def test_arguments_arrive_as_they_are(run, before):
    status, out, error = run(*before, sys.executable, "-c", PRINT_ARGUMENTS, *ARGUMENTS)
    assert status == 0
    summary = "ebbtide: summary of .*: it used neither CUDA nor torch\n" if "--summary" in before else ""
    assert re.fullmatch(summary, error)
    assert out.split(b"\0") == [os.fsencode(argument) for argument in ARGUMENTS]


def test_a_program_whose_name_begins_with_a_dash(run, tmp_path):
    (tmp_path / "--summary").symlink_to("/bin/echo")
    assert run("--", "--summary", "said", PATH=str(tmp_path)) == (0, b"said\n", "")


def test_the_name_that_the_program_sees_is_the_one_that_was_typed(run):
    status, out, _ = run("--", "sh", "-c", "cat /proc/$$/cmdline")
    assert (status, out.split(b"\0")[0]) == (0, b"sh")


@pytest.mark.parametrize("locale", ["C.UTF-8", "C", None])
def test_nothing_but_our_variables_is_added_to_the_environment(run, variables, locale):
    settings = {"LANG": locale, "LC_ALL": None, "LC_CTYPE": None}
    environment = environment_of(run("--", "env", "-0", **settings))
    expected = {name: value for name, value in {**variables, **settings}.items() if value is not None}
    assert {name: value for name, value in environment.items() if name not in ADDED} == expected
    assert set(environment) == set(expected) | ADDED


def test_signals_and_files_are_as_without_us(run, variables):
    # Not SigQ, which counts the queued signals of all processes of the user.
    command = ["sh", "-c", "grep '^Sig[BIC]' /proc/self/status; cd /proc/self/fd; echo *"]
    plain = subprocess.run(command, env=variables, stdin=subprocess.PIPE, capture_output=True, check=True)
    assert run("--", *command) == (0, plain.stdout, "")


# --- LD_PRELOAD, and a run inside a run ---


def test_our_library_is_loaded_first_and_the_users_own_is_kept(run, package):
    ours = str(package / "libebbtide_preload.so")
    environment = environment_of(run("--", "env", "-0", LD_PRELOAD="libm.so.6 libdl.so.2"))
    assert environment["LD_PRELOAD"] == f"{ours}:libm.so.6:libdl.so.2"
    _, out, _ = run("--", "cat", "/proc/self/maps", LD_PRELOAD="libm.so.6")
    assert ours in out.decode() and "libm.so.6" in out.decode()


def test_inside_another_run_the_inner_options_win_and_the_rest_stays(run, package):
    outer = ["--overflow", "whole", "--reserve", "1GiB", "--pauseable", "--tag", "job", "--summary", "--"]
    inner = ["--reserve", "1MiB", "--no-summary", "--", "env", "-0"]
    nested = [sys.executable, "-m", "ebbtide.cli", "run"]
    environment = environment_of(run(*outer, *nested, *inner, LD_PRELOAD="libm.so.6"))
    assert environment["LD_PRELOAD"] == f"{package / 'libebbtide_preload.so'}:libm.so.6"
    assert environment["EBBTIDE_RESERVE"] == str(1 << 20)
    assert environment["EBBTIDE_SUMMARY"] == "0"
    assert (environment["EBBTIDE_OVERFLOW"], environment["EBBTIDE_TAG"]) == ("whole", "job")
    # An option that belongs to an option of the outer run may be given inside.
    environment = environment_of(run(*outer, *nested, "--tag", "other", "--", "env", "-0"))
    assert (environment["EBBTIDE_PAUSEABLE"], environment["EBBTIDE_TAG"]) == ("1", "other")


def test_unified_memory_of_ggml_is_unset_with_a_line(run):
    name = "GGML_CUDA_ENABLE_UNIFIED_MEMORY"
    for value in ("1", ""):
        status, out, error = run("--", "env", "-0", **{name: value})
        assert status == 0 and name.encode() not in out
        assert error.startswith(f"ebbtide: {name} is unset") and error.count("\n") == 1
    assert run("--", "true")[2] == ""


# --- invalid arguments ---

COMMAND = ["--", "true"]


@pytest.mark.parametrize(
    ("arguments", "status", "sentence"),
    [
        ([], 2, "there is no command"),
        (["--"], 2, "there is no command"),
        (["--summary"], 2, "there is no command"),
        (["--", ""], 127, "there is no program ''"),
        (["--", "no-such-program"], 127, "there is no program 'no-such-program'"),
        (["--", "./no-such-program"], 127, "there is no program './no-such-program'"),
        (["--", "/etc/passwd"], 126, "/etc/passwd is not executable"),
        (["--", "/etc"], 126, "/etc is a folder"),
        (["--no-such-option", *COMMAND], 2, "--no-such-option"),
        (["--overflow", "splitt", *COMMAND], 2, "--overflow must be one of split, managed, whole, none, not 'splitt'"),
        (["--report", "all", *COMMAND], 2, "--report must be one of device, free, total"),
        (["--log", "loud", *COMMAND], 2, "--log must be one of error, warning, info, debug"),
        (["--device-limit", "20G", *COMMAND], 2, "--device-limit has the unknown unit 'G'"),
        (["--device-limit", "", *COMMAND], 2, "--device-limit must be a size"),
        (["--reserve", "-1", *COMMAND], 2, "--reserve must not be negative"),
        (["--host-limit", "much", *COMMAND], 2, "--host-limit must be a size"),
        (["--host-limit", "4096TiB", *COMMAND], 2, "--host-limit is 4096.0 TiB, and this machine has"),
        (["--host-margin", "4096TiB", *COMMAND], 2, "--host-margin is 4096.0 TiB, and this machine has"),
        (["--host-pool", "4096TiB", *COMMAND], 2, "--host-pool is 4096.0 TiB, and this machine has"),
        (["--host-pool", "2MiB", "--host-limit", "1MiB", *COMMAND], 2, "--host-limit allows 1.0 MiB"),
        (["--overflow", "none", "--report", "total", *COMMAND], 2, "--report total promises host memory, not given"),
        (["--tag", "job", *COMMAND], 2, "--tag means nothing without --pauseable"),
        (["--no-pauseable", "--tag", "job", *COMMAND], 2, "--tag means nothing without --pauseable"),
        (["--backup", "disk", *COMMAND], 2, "--backup means nothing without --pauseable"),
        (["--pauseable", "--backup", "tape", *COMMAND], 2, "--backup must be one of ram, pinned, disk, none"),
        (["--pauseable", "--tag", "a/b", *COMMAND], 2, "--tag: '*' and '/' are reserved in tags"),
    ],
)
def test_nonsense_is_refused_with_one_sentence(refused, arguments, status, sentence):
    found, out, error = refused(*arguments)
    assert (found, out) == (status, "")
    (line,) = [line for line in error.splitlines() if line.startswith("Error: ")]
    assert sentence in line


def test_a_refusal_is_the_status_of_the_command(run):
    status, out, error = run("--overflow", "splitt", *COMMAND)
    assert (status, out) == (2, b"") and "\nError: --overflow must be one of " in error and "Traceback" not in error


def test_a_malformed_variable_is_refused_by_its_name(run, refused):
    for name, value in {
        "EBBTIDE_OVERFLOW": "splitt",
        "EBBTIDE_HOST_LIMIT": "5x",
        "EBBTIDE_PAUSEABLE": "yes",
        "EBBTIDE_COPY_THREADS": "-3",
        "EBBTIDE_SIM_CAPACITY": "lots",
    }.items():
        status, _, error = refused("--", "true", **{name: value})
        assert status == 2 and f"Error: {name} " in error
    assert run("--", "true", EBBTIDE_OVERFLOW="") == (0, b"", "")


def test_a_file_that_is_no_program_is_refused(run, tmp_path):
    script = tmp_path / "script"
    script.write_text("echo no interpreter is named\n")
    assert run("--", str(script))[0] == 126
    script.chmod(0o755)
    status, _, error = run("--", str(script))
    assert status == 126 and "nor a script that begins with #!" in error


def test_a_program_that_can_not_be_preloaded_is_named(run, tmp_path):
    """The program is started all the same, because its children may be preloaded."""
    program = tmp_path / "static"
    header = b"\x7fELF\x02\x01\x01".ljust(18, b"\0") + Path(sys.executable).read_bytes()[18:20]
    program.write_bytes(header + struct.pack("<IQQQIHHHHHH", 1, 0, 0, 0, 0, 64, 56, 0, 0, 0, 0))
    program.chmod(0o755)
    status, _, error = run("--", str(program))
    assert error.startswith(f"ebbtide: {program} is linked statically: LD_PRELOAD is ignored there\n")
    assert status == 126 and f"{program} can't be started" in error


# --- dry run ---

OPTIONS = {
    "overflow": "whole",
    "device_limit": "20GiB",
    "host_limit": "64 MiB",
    "host_margin": 4096,
    "host_pool": "1MiB",
    "reserve": "1.5GB",
    "report": "free",
    "pauseable": True,
    "tag": 'it\'s "a" $tag\\',
    "backup": "none",
    "summary": True,
    "log": "info",
}


def as_arguments(options):
    """Converts keywords of `ebbtide.env` to the command's options."""
    words = []
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            words.append(option if value else option.replace("--", "--no-", 1))
        else:
            words += [option, str(value)]
    return words


def test_what_a_dry_run_prints_makes_a_shell_the_same(run, variables, tmp_path):
    ledger = str(tmp_path / "ledger")
    settings = {"EBBTIDE_LEDGER": ledger, "LD_PRELOAD": "libm.so.6", "GGML_CUDA_ENABLE_UNIFIED_MEMORY": "1"}
    made = environment_of(run(*as_arguments(OPTIONS), "--", "env", "-0", **settings))
    dry = [sys.executable, "-m", "ebbtide.cli", "run", *as_arguments(OPTIONS), "--dry-run"]
    shell = ["sh", "-c", 'while read -r line; do eval "$line"; done; env -0']
    lines = subprocess.run(dry, env={**variables, **settings}, capture_output=True, check=True)
    assert lines.stderr == b""
    assert b"unset GGML_CUDA_ENABLE_UNIFIED_MEMORY\n" in lines.stdout
    result = subprocess.run(shell, input=lines.stdout, env={"PATH": os.defpath}, capture_output=True, check=True)
    read = parse_environment(result.stdout)
    assert {name.decode() for name in read} - {"PWD", "SHLVL", "_"} <= set(made)
    added = {name: value for name, value in made.items() if name in ADDED or name.startswith("EBBTIDE_")}
    assert {name: os.fsdecode(read[name.encode()]) for name in added} == added


def test_a_dry_run_starts_and_makes_nothing(run, refused, variables, tmp_path):
    status, out, _ = run("--dry-run", "--", "touch", str(tmp_path / "made"))
    assert status == 0 and b"export LD_PRELOAD=" in out
    assert not (tmp_path / "made").exists() and list(Path(variables["XDG_RUNTIME_DIR"]).iterdir()) == []
    assert refused("--dry-run")[0] == 0
    assert refused("--dry-run", "--", "no-such-program")[0] == 127
    assert refused("--dry-run", "--tag", "job")[0] == 2


def test_every_option_sets_its_variable(run):
    environment = environment_of(run(*as_arguments(OPTIONS), "--", "env", "-0"))
    assert {name: value for name, value in environment.items() if name.startswith("EBBTIDE_")} == {
        "EBBTIDE_OVERFLOW": "whole",
        "EBBTIDE_DEVICE_LIMIT": str(20 << 30),
        "EBBTIDE_HOST_LIMIT": str(64 << 20),
        "EBBTIDE_HOST_MARGIN": "4096",
        "EBBTIDE_HOST_POOL": str(1 << 20),
        "EBBTIDE_RESERVE": "1500000000",
        "EBBTIDE_REPORT": "free",
        "EBBTIDE_PAUSEABLE": "1",
        "EBBTIDE_TAG": OPTIONS["tag"],
        "EBBTIDE_BACKUP": "none",
        "EBBTIDE_SUMMARY": "1",
        "EBBTIDE_LOG": "info",
        "EBBTIDE_LEDGER": environment["EBBTIDE_LEDGER"],
    }


def test_the_summary_of_a_program_without_cuda(run):
    """What it starts says nothing."""
    program = (sys.executable, "-c", "import subprocess; subprocess.run(['ls', '/'], stdout=-3); print('hi')")
    status, out, error = run("--summary", "--", *program)
    assert (status, out) == (0, b"hi\n")
    assert re.fullmatch(r"ebbtide: summary of python\S* \(PID \d+\): it used neither CUDA nor torch\n", error), error
    assert run("--no-summary", "--", *program) == (0, b"hi\n", "")


def test_a_run_that_does_nothing_says_so(run):
    program = (sys.executable, "-c", "print('hi')")
    status, out, error = run("--device-limit", "4MiB", "--", *program, EBBTIDE_DRIVER="sim")
    assert (status, out) == (0, b"hi\n")
    assert error.startswith("ebbtide: EBBTIDE_DRIVER=sim switches the preload library off")
    assert run("--lms", "64MiB", "--", *program, EBBTIDE_DRIVER="sim") == (0, b"hi\n", "")
