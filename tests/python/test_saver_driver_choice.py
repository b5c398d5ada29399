"""EBBTIDE_DRIVER: every combination of setting, torch and driver has one outcome and one line of explanation."""

import itertools
import shutil
from pathlib import Path

import pytest
from ebbtide.driver_choice import decide, read_setting

WORKS, BROKEN = None, "no CUDA driver: libcuda.so.1 is not there"

# (setting, torch, the driver's problem) -> the driver, or a part of the line that refuses the combination.
OUTCOMES = {
    ("auto", "none", WORKS): "install torch",
    ("auto", "none", BROKEN): "install torch",
    ("auto", "cpu", WORKS): "sim",
    ("auto", "cpu", BROKEN): "sim",
    ("auto", "cuda", WORKS): "cuda",
    ("auto", "cuda", BROKEN): "no working NVIDIA driver",
    ("auto", "rocm", WORKS): "hip",
    ("auto", "rocm", BROKEN): "no working HIP",
    ("cuda", "none", WORKS): "install torch",
    ("cuda", "none", BROKEN): "install torch",
    ("cuda", "cpu", WORKS): "torch is a CPU build",
    ("cuda", "cpu", BROKEN): "torch is a CPU build",
    ("cuda", "cuda", WORKS): "cuda",
    ("cuda", "cuda", BROKEN): "no working NVIDIA driver",
    ("cuda", "rocm", WORKS): "ROCm",
    ("cuda", "rocm", BROKEN): "ROCm",
    ("hip", "none", WORKS): "install torch",
    ("hip", "none", BROKEN): "install torch",
    ("hip", "cpu", WORKS): "torch is a CPU build",
    ("hip", "cpu", BROKEN): "torch is a CPU build",
    ("hip", "cuda", WORKS): "torch is built with CUDA",
    ("hip", "cuda", BROKEN): "torch is built with CUDA",
    ("hip", "rocm", WORKS): "hip",
    ("hip", "rocm", BROKEN): "no working HIP",
    ("sim", "none", WORKS): "install torch",
    ("sim", "none", BROKEN): "install torch",
    ("sim", "cpu", WORKS): "sim",
    ("sim", "cpu", BROKEN): "sim",
    ("sim", "cuda", WORKS): "sim",
    ("sim", "cuda", BROKEN): "sim",
    ("sim", "rocm", WORKS): "sim",
    ("sim", "rocm", BROKEN): "sim",
}


@pytest.mark.parametrize(
    ("setting", "torch_kind", "problem"),
    list(itertools.product(("auto", "cuda", "hip", "sim", "off"), ("none", "cpu", "cuda", "rocm"), (WORKS, BROKEN))),
)
def test_every_combination(setting, torch_kind, problem):
    """The driver is asked only where its answer matters, since that fixes the choice."""
    asked = []

    def find_problem(driver):
        assert driver == ("hip" if torch_kind == "rocm" else "cuda")
        asked.append(True)
        return problem

    wanted = "off" if setting == "off" else OUTCOMES[setting, torch_kind, problem]
    outcome = decide(setting, torch_kind, find_problem)
    if wanted in ("cuda", "hip", "sim", "off"):
        assert outcome.driver == wanted and outcome.advice == ""
    else:
        assert outcome.driver is None
        assert wanted in outcome.line
        assert f"{outcome.found}: {outcome.advice}" == outcome.line
        assert outcome.advice.startswith(("run where there is", "install"))
        assert outcome.found.count("(") == outcome.found.count(")")
    assert "\n" not in outcome.line
    assert bool(outcome.line) == (outcome.driver is None or (setting == "auto" and outcome.driver in ("sim", "hip")))
    if outcome.driver is None and torch_kind != "none":
        assert "EBBTIDE_DRIVER=sim" in outcome.line  # suggests a way to try ebbtide with the torch that is installed
    differs = setting != "off" and OUTCOMES[setting, torch_kind, WORKS] != OUTCOMES[setting, torch_kind, BROKEN]
    assert asked == [True] * differs


@pytest.mark.parametrize(
    ("text", "setting"), [(None, "auto"), ("", "auto"), ("CUDA", "cuda"), (" sim ", "sim"), ("off", "off")]
)
def test_settings(text, setting, monkeypatch):
    monkeypatch.setenv("EBBTIDE_DRIVER", text) if text is not None else monkeypatch.delenv("EBBTIDE_DRIVER", False)
    assert read_setting() == setting


def test_an_unknown_setting_lists_the_known_ones(monkeypatch):
    monkeypatch.setenv("EBBTIDE_DRIVER", "gpu")
    with pytest.raises(ValueError, match="auto, cuda, hip, sim, off"):
        read_setting()


@pytest.mark.sim_only
def test_tests_on_the_simulated_device_see_no_gpu(run_python):
    program = "import torch; assert not torch.cuda.is_available(); assert torch.cuda.device_count() == 0"
    assert run_python(program).returncode == 0


@pytest.mark.sim_only
def test_auto_with_a_cpu_torch_says_so_once(run_python):
    result = run_python(
        """
        import torch
        torch.version.cuda = None
        from ebbtide import saver
        assert saver.device == "cpu"
        with saver.region("a"), saver.region("b"):
            pass
    """,
        EBBTIDE_DRIVER=None,
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("using the simulated device") == 1
    assert [line for line in result.stderr.splitlines() if line.startswith("ebbtide")] != []


@pytest.mark.sim_only
@pytest.mark.parametrize("where", ["/dev/full", "a pipe without a reader", "nowhere", "an object", "default SIGPIPE"])
def test_a_line_that_stderr_does_not_take_fails_no_region(run_python, where):
    """Nor the process as it ends, by what is left in the buffer of stderr."""
    result = run_python(
        f"""
        import os, signal, sys
        import torch
        torch.version.cuda = None
        where = {where!r}
        if where == "default SIGPIPE":
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        if where == "an object":
            class Stream:
                def write(self, text):
                    raise RuntimeError("not now")

                def flush(self):
                    pass

            sys.stderr = Stream()
        if where == "nowhere":
            os.close(2)
            sys.stderr = sys.__stderr__ = None
        elif where == "/dev/full":
            os.dup2(os.open(where, os.O_WRONLY), 2)
        elif where != "an object":
            ends = os.pipe()
            os.close(ends[0])
            os.dup2(ends[1], 2)
        from ebbtide import saver
        with saver.region("a"):
            kept = torch.ones(9)
        print(saver.where(kept).tag, saver.device)
    """,
        EBBTIDE_DRIVER=None,
    )
    assert (result.returncode, result.stdout) == (0, "a cpu\n"), result.stderr


@pytest.mark.sim_only
def test_cuda_with_a_cpu_torch_is_refused_at_the_region(run_python):
    result = run_python(
        """
        import torch
        torch.version.cuda = None
        import ebbtide
        from ebbtide import saver
        scope = saver.region("a")
        try:
            with scope:
                raise SystemExit("entered")
        except ebbtide.StateError as error:
            assert "torch is a CPU build" in str(error), error
    """,
        EBBTIDE_DRIVER="cuda",
    )
    assert result.returncode == 0, result.stderr


def test_no_torch_is_refused_at_the_region(run_python):
    result = run_python(
        """
        import sys
        sys.modules["torch"] = None
        import ebbtide
        from ebbtide import saver
        try:
            saver.region("a").__enter__()
        except ebbtide.StateError as error:
            assert "install torch" in str(error), error
        else:
            raise SystemExit("entered")
    """
    )
    assert result.returncode == 0, result.stderr


def test_an_unknown_setting_arrives_at_the_first_use(run_python):
    result = run_python("from ebbtide import saver; saver.pause()", EBBTIDE_DRIVER="gpu")
    assert result.returncode == 1
    assert "EBBTIDE_DRIVER must be one of" in result.stderr


def test_off_is_a_no_op_everywhere(run_python):
    pytest.importorskip("torch")
    result = run_python(
        """
        import sys
        import torch
        from ebbtide import saver
        device = saver.device
        assert device == ("cuda" if torch.cuda.is_available() else "cpu")
        with saver.region("w", threads="all") as scope, saver.disabled():
            t = torch.ones(10, device=device)
        @saver.region("w", backup=None)
        def make():
            return torch.ones(3, device=device)
        assert make().sum() == 3
        assert saver.adopt(t, tag="w").bytes == 0
        for report in (saver.pause(), saver.pause("never named"), saver.resume("w", timeout=5)):
            assert (report.bytes, report.by_tag, report.remaining) == (0, {}, ()), report
            str(report)
        with saver.paused("w") as report:
            assert report.bytes == 0
        assert saver.backup_of(t) is None and not saver.is_paused("w")
        assert saver.stats() == {} and saver.tags() == {} and saver.timeline == []
        saver.configure(device_limit="1GiB")
        saver.on("before_pause", "w", print)()
        assert "ebbtide._torch" not in sys.modules
    """,
        EBBTIDE_DRIVER="off",
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""


@pytest.mark.sim_only
def test_a_cuda_torch_without_a_driver_is_one_clear_sentence(run_python):
    """As on a machine without a GPU. The kind of torch is faked; the missing driver is real."""
    result = run_python(
        """
        import torch
        torch.version.cuda = "13.0"
        import ebbtide
        from ebbtide import saver
        try:
            saver.region("a").__enter__()
        except ebbtide.StateError as error:
            text = str(error)
        assert text.startswith("torch is built with CUDA, but there is no working NVIDIA driver ("), text
        assert "EBBTIDE_DRIVER=off" in text, text
        assert "set EBBTIDE_DRIVER=sim to try ebbtide with CPU tensors on the simulated device" in text, text
    """,
        EBBTIDE_DRIVER=None,
    )
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.sim_only
@pytest.mark.parametrize("build", [{"cuda": "13.2"}, {"cuda": None, "hip": "7.0"}, {"cuda": None, "hip": None}])
def test_sim_serves_every_build_of_torch(run_python, build):
    """Also a build whose GPUs are in use: they are left alone. If torch is a CPU build, its kind is faked."""
    result = run_python(
        f"""
        import torch
        for name, value in {build!r}.items():
            setattr(torch.version, name, value)
        torch.cuda.is_initialized = lambda: True
        torch.cuda.empty_cache = torch._C._cuda_clearCublasWorkspaces = None
        from ebbtide import _core, saver
        assert saver.device == "cpu"
        with saver.region("a"):
            t = torch.arange(1 << 20)
        assert saver.pause("a").bytes > 0
        assert saver.backup_of(t)[-1] == (1 << 20) - 1
        saver.resume("a", timeout=5)
        assert t[-1] == (1 << 20) - 1 and _core.find(t.data_ptr()).tag == "a"
        u = torch.ones(1 << 20)
        assert saver.adopt(u, tag="a").bytes == 4 << 20
    """,
        EBBTIDE_DRIVER="sim",
    )
    assert (result.returncode, result.stderr) == (0, "")


def hip_of_the_simulator(folder, name):
    import ebbtide

    return shutil.copy(Path(ebbtide.__file__).parent / "libebbtide_sim.so", folder / name)


USE_HIP = """
    import ebbtide
    from ebbtide import _core
    _core.use_driver("hip")
    try:
        print(_core.device_count(), _core.driver_name())
    except ebbtide.StateError as error:
        print(error)
"""


@pytest.mark.sim_only
def test_hips_library_is_the_systems_or_the_one_that_is_loaded(run_python, tmp_path):
    """The simulator, which has HIP's names, stands for both. torch for ROCm loads one under a path of its own."""
    assert run_python(USE_HIP).stdout.startswith("no HIP: libamdhip64.so: cannot open shared object file")
    hip_of_the_simulator(tmp_path, "libamdhip64.so")
    assert run_python(USE_HIP, LD_LIBRARY_PATH=str(tmp_path)).stdout == "1 hip\n"
    (tmp_path / "torch").mkdir()
    loaded = hip_of_the_simulator(tmp_path / "torch", "libamdhip64.so.7")
    assert (
        run_python(f"import ctypes; ctypes.CDLL({str(loaded)!r})" + USE_HIP.replace("\n    ", "\n")).stdout == "1 hip\n"
    )
