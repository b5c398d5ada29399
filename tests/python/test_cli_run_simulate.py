"""`ebbtide run --simulate` gives programs of the driver API, which know nothing of ebbtide, the simulated device."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import ebbtide
import pytest
from checks.toolchain import find_cuda_include
from simulated_programs import ASKS_AS_THE_RUNTIME, FORKS, LAUNCHES, OPENER, OWN_CONTEXTS, PAUSE, PRELUDE

PACKAGE = Path(ebbtide.__file__).resolve().parent
SIMULATED = str(PACKAGE / "simulated")
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "09_driver_program.c"
MIB = 1 << 20


@pytest.fixture
def run(ebbtide_run):
    return ebbtide_run


@pytest.fixture
def build(tmp_path):
    """Compiles a C program against the package's stubs, with further words for the compiler."""

    def build(text, *options, name="program"):
        source = tmp_path / f"{name}.c"
        source.write_text(text)
        command = ["cc", "-std=gnu11", "-Wall", "-Werror", f"-I{find_cuda_include()}", str(source)]
        stubs = [f"-L{SIMULATED}/stubs", "-lcuda", "-ldl"]
        subprocess.run([*command, "-o", str(tmp_path / name), *options, *stubs], check=True)
        return tmp_path / name

    return build


@pytest.fixture
def example(build):
    return build(EXAMPLE.read_text())


# --- programs that are linked against the driver, or open it ---


def test_a_linked_program_meets_a_device_of_the_size(run, example):
    status, out, error = run("--simulate=1GiB", "--", example)
    assert (status, error) == (0, "")
    assert out == "device 0: ebbtide simulated device, 1024 MiB\n6 buffers of 64 MiB held what was written\n"


def test_the_options_of_run_apply(run, example):
    """256 MiB of device memory for 384 MiB of buffers."""
    status, out, error = run("--simulate=256MiB", "--summary", "--", example)
    assert (status, out.splitlines()[-1]) == (0, "6 buffers of 64 MiB held what was written")
    spill, summary = error.splitlines()
    assert "lie in host memory" in spill
    assert summary.startswith("ebbtide: summary of program (PID ") and " went to the host" in summary
    status, _, error = run("--simulate=256MiB", "--overflow", "none", "--", example)
    assert status == 1 and error.splitlines()[-1] == "cuMemAlloc failed: 2"
    # The peak is what was held: the fifth buffer was refused.
    _, _, error = run("--simulate=256MiB", "--overflow", "none", "--summary", "--", example)
    assert error.splitlines()[-1].endswith(": at most 256 MiB on device 0; nothing overflowed to the host")
    _, out, _ = run("--simulate=256MiB", "--device-limit", "128MiB", "--report", "device", "--", example)
    assert out.startswith("device 0: ebbtide simulated device, 128 MiB\n")


def test_a_program_that_uses_no_memory_is_told_in_the_summary(run, build):
    idle = build(PRELUDE + "int main(void) { start(); return 0; }")
    _, _, error = run("--simulate", "--summary", "--", idle)
    assert error.endswith("it never asked CUDA for device memory\n")


@pytest.mark.parametrize("name", ["libcuda.so.1", "libcuda.so"])
def test_a_program_that_opens_the_driver(run, build, name):
    opener = build(PRELUDE + OPENER)
    assert run("--simulate=96MiB", "--", opener, name) == (0, "96\n", "")


def test_a_program_with_contexts_of_its_own(run, build):
    program = build(PRELUDE + OWN_CONTEXTS)
    assert run("--simulate=256MiB", "--", program) == (0, "whole\n", "")
    # Two buffers and the copy are on the host. ebbtide makes such memory in the primary context, where it outlives the
    # program's.
    status, out, error = run("--simulate=64MiB", "--", program)
    assert (status, out) == (0, "kept\nwhole\n") and "lie in host memory" in error


def test_a_driver_program_pauses_itself_in_c(run, build):
    """The program's own calls and ebbtide's C API work with one device."""
    flags = [f"-I{PACKAGE / 'include'}", f"-L{PACKAGE}", "-lebbtide", f"-Wl,-rpath,{PACKAGE}"]
    program = build(PRELUDE + PAUSE, *flags)
    options = ["--simulate=64MiB", "--pauseable", "--pauseable-all", "--tag", "job"]
    assert run(*options, "--", program) == (0, "cuda 32 32 7\n", "")


# --- what does not run is said ---


def test_the_cuda_runtime_is_named(run, build):
    """The runtime asks for cuGetExportTable, by which it finds that this is no driver for it."""
    program = build(PRELUDE + ASKS_AS_THE_RUNTIME)
    status, _, error = run("--simulate", "--", program)
    assert status == 0 and error.startswith("ebbtide: this program uses the CUDA runtime") and error.count("\n") == 1


def test_a_kernel_is_refused_by_its_name(run, build):
    program = build(PRELUDE + LAUNCHES)
    status, _, error = run("--simulate", "--", program)
    assert status == 0 and "refuses to launch add, as not supported (801)" in error and error.count("\n") == 1


def test_a_program_with_an_rpath_to_another_driver_is_named(run, tmp_path, build):
    """DT_RPATH comes before LD_LIBRARY_PATH, DT_RUNPATH after it."""
    (tmp_path / "system").mkdir()
    other = shutil.copy(Path(SIMULATED) / "stubs" / "libcuda.so", tmp_path / "system" / "libcuda.so.1")
    text, rpath = EXAMPLE.read_text(), "-Wl,-rpath,/nowhere:$ORIGIN/system"
    old = build(text, rpath, "-Wl,--disable-new-dtags", name="old")
    status, _, error = run("--simulate", "--", old)
    assert error.splitlines()[0].startswith(f"ebbtide: {old} finds {other} by its RPATH")
    assert status == 1 and "cuInit failed: 34" in error  # the stub library's
    assert run("--", "true")[2] == ""
    new = build(text, rpath, "-Wl,--enable-new-dtags", name="new")
    assert run("--simulate", "--", new)[::2] == (0, "")
    ours = build(text, f"-Wl,-rpath,{SIMULATED}", "-Wl,--disable-new-dtags", name="ours")
    assert run("--simulate", "--", ours)[::2] == (0, "")


def test_a_static_program_is_named(run, tmp_path):
    source = tmp_path / "static.c"
    source.write_text("int main(void) { return 7; }\n")
    made = subprocess.run(["cc", "-static", str(source), "-o", str(tmp_path / "static")], check=False)
    if made.returncode != 0:
        pytest.skip("no static libc here")
    status, _, error = run("--simulate", "--", tmp_path / "static")
    assert status == 7 and error.endswith("LD_PRELOAD is ignored there, and it has no simulated device\n")


# --- children ---


def test_children_meet_the_device_too(run, example):
    status, out, _ = run("--simulate=1GiB", "--", "sh", "-c", f"{example} && exec {example}")
    assert (status, out.count("held what was written")) == (0, 2)


def test_a_forked_child_of_a_program_that_uses_the_device_is_refused(run, build):
    """As by the real driver. A child that was forked before has a device of its own."""
    program = build(PRELUDE + FORKS)
    assert run("--simulate", "--", program)[0] == 0


# --- the environment ---

PRINT = "import os; print(*(os.environ.get(name, '-') for name in ('LD_LIBRARY_PATH', 'EBBTIDE_SIM_CAPACITY')))"


def seen(run, *arguments, **environment):
    status, out, error = run(*arguments, "--", sys.executable, "-c", PRINT, **environment)
    assert status == 0, error
    return out.split()


def test_the_users_library_path_goes_on_behind_ours(run):
    assert seen(run, "--simulate") == [SIMULATED, "-"]
    assert seen(run, "--simulate", LD_LIBRARY_PATH="") == [SIMULATED, "-"]
    assert seen(run, "--simulate", LD_LIBRARY_PATH=f"/a::{SIMULATED}:/b") == [f"{SIMULATED}:/a::/b", "-"]
    assert seen(run, "--overflow", "none", LD_LIBRARY_PATH="/a") == ["/a", "-"]


def test_the_size_is_the_variables_unless_it_is_given(run):
    assert seen(run, "--simulate", EBBTIDE_SIM_CAPACITY="5MiB") == [SIMULATED, "5MiB"]
    for words in (["--simulate=2MiB"], ["--simulate", "2MiB"], ["--simulate=2 MiB", "--summary"]):
        assert seen(run, *words, EBBTIDE_SIM_CAPACITY="5MiB") == [SIMULATED, str(2 * MIB)]


def test_a_run_inside_the_run_goes_on_with_it(run):
    nested = [sys.executable, "-m", "ebbtide.cli", "run"]
    status, out, _ = run("--simulate=2MiB", "--", *nested, "--", sys.executable, "-c", PRINT)
    assert (status, out.split()) == (0, [SIMULATED, str(2 * MIB)])


def test_env_may_leave_the_simulated_device(monkeypatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", "/a")
    assert "LD_LIBRARY_PATH" not in ebbtide.env(simulate=False)
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{SIMULATED}:/a")
    assert ebbtide.env(simulate=False)["LD_LIBRARY_PATH"] == "/a"
    assert "LD_LIBRARY_PATH" not in ebbtide.env()
    with ebbtide.preloaded(simulate=3 * MIB):
        assert os.environ["EBBTIDE_SIM_CAPACITY"] == str(3 * MIB)
    assert os.environ["LD_LIBRARY_PATH"] == f"{SIMULATED}:/a"


@pytest.mark.parametrize(
    ("size", "error", "sentence"),
    [
        (None, TypeError, "simulate must be a size"),
        (1.5, TypeError, "simulate must be a size"),
        (0, ValueError, "simulate must be more than 0 bytes"),
        (-1, ValueError, "simulate must not be negative"),
        ("much", ValueError, "simulate must be a size"),
    ],
)
def test_a_size_that_is_none_is_refused(size, error, sentence):
    with pytest.raises(error, match=f"^{sentence}"):
        ebbtide.env(simulate=size)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--simulate=5x", "--", "true"], "--simulate has the unknown unit 'x'"),
        (["--simulate=0", "--", "true"], "--simulate must be more than 0 bytes"),
        (["--simulate=", "--", "true"], "or nothing, not ''"),
        (["--simulate", "./program", "argument"], "write `--simulate -- ./program` if it is the program"),
        (["--simulate=16GiB"], "there is no command"),
    ],
)
def test_nonsense_is_refused(run, words, sentence):
    status, out, error = run(*words)
    assert (status, out) == (2, "") and sentence in error.splitlines()[-1]


def test_a_dry_run_tells_the_variables(run):
    _, out, _ = run("--simulate=1MiB", "--dry-run")
    assert {f"export LD_LIBRARY_PATH={SIMULATED}", f"export EBBTIDE_SIM_CAPACITY={MIB}"} <= set(out.splitlines())


@pytest.mark.parametrize("missing", ["libcuda.so.1", "libebbtide_sim.so"])
def test_a_package_without_the_driver_says_so(run, tmp_path, missing):
    shutil.copytree(PACKAGE, tmp_path / "ebbtide", ignore=shutil.ignore_patterns("__pycache__", missing))
    status, _, error = run("--simulate", "--", "true", PYTHONPATH=str(tmp_path))
    assert status == 1 and error.startswith("Error: the simulated driver is missing") and error.count("\n") == 1
    assert missing in error and "install ebbtide again" in error
    assert run("--", "true", PYTHONPATH=str(tmp_path))[0] == 0


def test_a_folder_that_the_loader_can_not_name_is_said(run, tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "a;b" / "ebbtide", ignore=shutil.ignore_patterns("__pycache__"))
    status, _, error = run("--simulate", "--", "true", PYTHONPATH=str(tmp_path / "a;b"))
    assert status == 1 and error.startswith("Error: LD_LIBRARY_PATH takes no path") and error.count("\n") == 1


def test_a_driver_setting_for_cpu_tensors_does_not_switch_the_options_off(run, example):
    """EBBTIDE_DRIVER=sim alone makes the preload library step aside."""
    status, _, error = run("--simulate=256MiB", "--", example, EBBTIDE_DRIVER="sim")
    assert status == 0 and "lie in host memory" in error
    status, _, error = run("--simulate=256MiB", "--", example, EBBTIDE_DRIVER="off")
    assert status == 1 and error == "cuMemAlloc failed: 2\n"  # ebbtide is off, and the device is as large as asked


DOCTOR = """
import sys
from ebbtide import cli, driver_choice
kind = sys.argv.pop()
driver_choice.installed_torch_kind = lambda: kind
cli.main()
"""


@pytest.mark.parametrize(("kind", "expected"), [("cpu", 0), ("cuda", 1)])
def test_doctor_names_the_driver_that_it_meets(run, kind, expected):
    """A torch with CUDA can't work there, and doctor says so by its status as well."""
    status, out, error = run("--simulate", "--", sys.executable, "-c", DOCTOR, "doctor", kind)
    assert (status, "leave --simulate out" in out) == (expected, bool(expected)), error + out
    assert f"the simulated driver, {SIMULATED}" in out


@pytest.mark.parametrize("size", ["-5", "-5GiB"])
def test_a_size_that_begins_with_a_dash_is_no_option(run, size):
    status, _, said = run(f"--simulate={size}", "--", "true")
    assert status == 2 and f"--simulate must be a size like \"16GiB\", or nothing, not '{size}'" in said
    assert "--nope" in run("--nope", "--simulate=-5", "true")[2]
