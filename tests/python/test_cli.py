"""`ebbtide doctor` and `ebbtide demo`: their output and exit status."""

import json
import os
import re
import subprocess
import sys

import pytest
from click.testing import CliRunner
from ebbtide.cli import main
from ebbtide.cli.diagnosis import Finding, diagnose, is_usable
from ebbtide.settings import all_settings

HIDE_TORCH = """
import sys
from importlib.abc import MetaPathFinder
class Hide(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torch" or name.startswith("torch."):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hide())
from ebbtide.cli import main
main(ARGUMENTS)
"""


WITHOUT_CORE = """
import sys
sys.modules["ebbtide._core"] = None  # as where the library is missing, or made for another Python
from ebbtide.cli import main
main(["doctor", "--json"])
"""


def problems(findings: list[dict[str, str]]) -> list[dict[str, str]]:
    return [finding for finding in findings if finding["status"] == "problem"]


def test_help_of_every_command_is_its_docstring() -> None:
    for name, command in main.commands.items():
        result = CliRunner().invoke(main, [name, "--help"])
        assert result.exit_code == 0
        assert command.callback.__doc__.strip().splitlines()[0] in result.output
        assert name in CliRunner().invoke(main, ["--help"]).output


def test_doctor_says_that_the_core_does_not_load() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_CORE], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 1, done.stderr
    found = problems(json.loads(done.stdout)["findings"])
    assert any("does not load" in each["found"] and each["advice"] == "install ebbtide again" for each in found)


def test_version() -> None:
    import ebbtide

    done = subprocess.run(
        [sys.executable, "-m", "ebbtide.cli", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"ebbtide {ebbtide.__version__}\n"


TO_A_FULL_DISK = """
import torch, os
os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
from ebbtide.cli import main
main([ARGUMENT])
"""


@pytest.mark.parametrize("argument", ["--version", "doctor"])
def test_an_output_that_cannot_be_written_is_a_sentence(run_python, argument) -> None:
    done = run_python(TO_A_FULL_DISK.replace("ARGUMENT", repr(argument)))
    assert (done.returncode, done.stderr) == (1, "ebbtide: the output can't be written: No space left on device\n")


def test_an_oserror_of_something_else_stays_what_it_is(tmp_path) -> None:
    """A broken torch raises one without a file."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("import ctypes; ctypes.CDLL('libcudart_missing.so.12')\n")
    command = [sys.executable, "-m", "ebbtide.cli", "demo"]
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    variables = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1 and "libcudart_missing.so.12: cannot open shared object file" in done.stderr


def test_importing_the_command_needs_neither_torch_nor_a_driver(run_python) -> None:
    result = run_python(
        "import sys, ebbtide.cli; assert 'torch' not in sys.modules and 'ebbtide._core' not in sys.modules"
    )
    assert result.returncode == 0, result.stderr


def test_importing_the_package_takes_little_but_its_errors(run_python) -> None:
    """Not what `ebbtide.env` needs, which is slow to import. Two packages are there to import their modules late."""
    result = run_python(
        "import sys, ebbtide\n"
        "print(*sorted(name for name in sys.modules if name.startswith('ebbtide')))\n"
        "assert ebbtide.env(overflow='split')['EBBTIDE_OVERFLOW'] == 'split'"
    )
    assert result.returncode == 0, result.stderr
    packages = ["ebbtide.compat", "ebbtide.integrations"]
    assert result.stdout.split() == sorted(
        ["ebbtide", "ebbtide.errors", "ebbtide.late_imports", "ebbtide.locks", *packages]
    )


def test_doctor_shows_everything_as_text_and_as_json(forked_command) -> None:
    text = forked_command("doctor", "--all")
    assert text.returncode == 0, text.stdout + text.stderr
    assert "ebbtide works here" in text.stdout
    assert all(setting.variable in text.stdout for setting in all_settings())
    data = json.loads(forked_command("doctor", "--json").stdout)
    assert data["usable"] is True
    sections = {finding["section"] for finding in data["findings"]}
    assert {"software", "driver", "device 0", "host memory", "preloading", "settings"} <= sections
    vmm = [finding for finding in data["findings"] if finding["name"] == "vmm"]
    assert [finding["status"] for finding in vmm] == ["ok"] * len(vmm) and vmm


def test_doctor_says_what_is_unusual_first_and_hides_defaults(forked_command) -> None:
    text = forked_command("doctor", EBBTIDE_HOST_LIMT="5GiB", EBBTIDE_HOST_LIMIT="5x", EBBTIDE_SUMMARY="1").stdout
    lines = [line.strip() for line in text.splitlines()]
    sections = [line for line in lines if line in ("problems and unusual findings", "software", "driver", "settings")]
    assert sections[0] == "problems and unusual findings"
    unusual = lines[: lines.index("software")]
    assert unusual[unusual.index(sections[0]) + 1].startswith("settings: EBBTIDE_HOST_LIMIT ")
    assert "EBBTIDE_HOST_LIMIT has the unknown unit 'x'" in " ".join(unusual)
    assert any("EBBTIDE_HOST_LIMT" in line for line in unusual)
    shown = [line.split()[0] for line in lines[lines.index("settings") :] if line.startswith("EBBTIDE_")]
    assert "EBBTIDE_SUMMARY" in shown and "EBBTIDE_RESERVE" not in text and "(default)" not in text
    assert "`ebbtide doctor --all` shows them" in text


def test_doctor_breaks_no_line_where_nobody_looks_at_a_screen(forked_command, tmp_path) -> None:
    folder = tmp_path / ("x" * 200)
    text = forked_command("doctor", EBBTIDE_CACHE_DIR=str(folder), COLUMNS="80").stdout
    assert str(folder) in text
    assert not any(line.endswith(" ") for line in text.splitlines())


@pytest.mark.sim_only
def test_doctor_covers_every_device(forked_command) -> None:
    data = json.loads(forked_command("doctor", "--json", EBBTIDE_SIM_DEVICES="3").stdout)
    devices = {finding["section"] for finding in data["findings"] if finding["section"].startswith("device ")}
    assert devices == {"device 0", "device 1", "device 2"}


def test_doctor_without_torch_says_what_to_install(run_python) -> None:
    for setting in ("auto", "sim", "cuda"):
        result = run_python(HIDE_TORCH.replace("ARGUMENTS", "['doctor', '--json']"), EBBTIDE_DRIVER=setting)
        data = json.loads(result.stdout)
        assert result.returncode == 1 and data["usable"] is False, result.stderr
        assert any("torch" in finding["advice"] for finding in problems(data["findings"])), setting


@pytest.mark.sim_only
@pytest.mark.parametrize(("cuda", "found"), [(None, "torch is a CPU build"), ("13.0", "no working NVIDIA driver (")])
def test_doctor_without_a_gpu_that_is_told_to_use_cuda(run_python, cuda, found) -> None:
    """The kind of torch is faked; the missing driver is real."""
    result = run_python(
        f"import torch\ntorch.version.cuda = {cuda!r}; from ebbtide.cli import main; main(['doctor', '--json'])",
        EBBTIDE_DRIVER="cuda",
    )
    (problem,) = problems(json.loads(result.stdout)["findings"])
    assert result.returncode == 1
    assert found in problem["found"]
    assert problem["advice"].startswith(("install torch with CUDA", "run where there is a GPU"))
    assert "EBBTIDE_DRIVER=sim" in problem["advice"]


@pytest.mark.sim_only
def test_doctor_without_a_compiler_says_what_to_install(forked_command, tmp_path) -> None:
    result = forked_command("doctor", "--json", CXX="no-such-compiler", EBBTIDE_CACHE_DIR=str(tmp_path))
    (problem,) = problems(json.loads(result.stdout)["findings"])
    assert result.returncode == 1
    assert (problem["section"], problem["name"]) == ("torch extension", "compiler")
    assert "install" in problem["advice"]


def test_doctor_names_malformed_and_unknown_variables(forked_command) -> None:
    result = forked_command("doctor", "--json", EBBTIDE_HOST_LIMIT="5x", EBBTIDE_HOST_LIMT="5GiB")
    findings = json.loads(result.stdout)["findings"]
    assert result.returncode == 1
    assert ["EBBTIDE_HOST_LIMIT" in problem["found"] for problem in problems(findings)] == [True]
    (unknown,) = [finding for finding in findings if finding["name"] == "EBBTIDE_HOST_LIMT"]
    assert "misspelt" in unknown["advice"]
    bad_driver = forked_command("doctor", EBBTIDE_DRIVER="gpu")
    assert bad_driver.returncode == 1 and "auto, cuda, hip, sim, off" in bad_driver.stdout


def test_doctor_switched_off_is_fine(forked_command) -> None:
    result = forked_command("doctor", EBBTIDE_DRIVER="off")
    assert result.returncode == 0 and "no-op" in result.stdout


def test_a_missing_required_capability_is_a_problem_and_an_optional_one_is_not(saver, monkeypatch) -> None:
    from ebbtide import _core

    assert saver.device and is_usable(diagnose())
    for name, usable in (("vmm", False), ("rdma", True)):
        missing = (name, False, "the probe failed", "do something")
        monkeypatch.setattr(_core, "capabilities", lambda device, missing=missing: [missing])
        findings = diagnose()
        assert is_usable(findings) is usable
        assert any(finding.found == "the probe failed" for finding in findings)


def test_a_probe_that_fails_becomes_a_finding(saver, monkeypatch) -> None:
    from ebbtide import _core

    def fail(device: int) -> None:
        raise RuntimeError("no answer")

    assert saver.device
    monkeypatch.setattr(_core, "query_device", fail)
    assert Finding("device", "RuntimeError", "no answer", "problem") in diagnose()


def test_demo_runs_the_main_job_where_both_tenants_would_not_fit(forked_command) -> None:
    size = ("demo", "--rounds", "2", "--steps", "2")
    result = forked_command(*size)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "identical to the run without pausing" in result.stdout
    for word in ("trainer_weights", "kv_cache", "hand over", "mean loss"):
        assert word in result.stdout
    peak, tenants = map(float, re.search(r"at most ([\d.]+) MiB .* are ([\d.]+) MiB", result.stdout).groups())
    assert peak < tenants
    assert forked_command(*size, EBBTIDE_DEVICE_LIMIT=f"{peak} MiB").returncode == 0


def test_demo_fails_where_the_runs_differ(capsys) -> None:
    pytest.importorskip("torch")
    from ebbtide.cli.demo import _show
    from ebbtide.demo.job import JobResult

    result = JobResult(losses=[[2.0], [1.0]], texts=["text"])
    assert _show(result, ["losses"]) == 1
    assert "FAILED: not as without pausing: losses" in capsys.readouterr().out
    assert _show(result, []) == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--width", "5"], "width must be a multiple of 4"),
        (["--steps", "0"], "at least 1"),
        (["--context", "8"], "context must be larger than 16"),
        (["--width", "many"], "not a valid integer"),
    ],
)
def test_demo_refuses_bad_input_with_a_sentence(arguments, sentence) -> None:
    pytest.importorskip("torch")
    result = CliRunner().invoke(main, ["demo", *arguments])
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit)
    assert sentence in result.stderr


def test_demo_refuses_a_malformed_variable_with_a_sentence(forked_command) -> None:
    result = forked_command("demo", EBBTIDE_DRIVER="gpu")
    assert result.returncode == 2
    assert "must be one of auto, cuda, hip, sim, off" in result.stderr and "Traceback" not in result.stderr


def test_demo_without_torch_says_what_to_install(run_python) -> None:
    result = run_python(HIDE_TORCH.replace("ARGUMENTS", "['demo']"))
    assert result.returncode == 1
    assert "install torch" in result.stderr and "Traceback" not in result.stderr


def test_demo_switched_off_says_so(forked_command) -> None:
    result = forked_command("demo", "--rounds", "1", "--steps", "1", EBBTIDE_DRIVER="off")
    assert result.returncode == 0 and "nothing was paused" in result.stdout


def test_demo_out_of_memory_is_a_sentence(forked_command) -> None:
    result = forked_command("demo", "--rounds", "1", "--steps", "1", EBBTIDE_DEVICE_LIMIT="2 MiB")
    assert result.returncode == 1
    assert "out of memory: make the job smaller" in result.stderr and "Traceback" not in result.stderr
