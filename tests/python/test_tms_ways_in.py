"""How a program gets ebbtide's torch_memory_saver: by PYTHONPATH, by `install()`, as SGLang's plug-in."""

import json
import os
import sys
from importlib import metadata
from pathlib import Path

import ebbtide
import pytest
from ebbtide import driver_choice
from ebbtide.launch import preloading

torch = pytest.importorskip("torch")

COMPAT = preloading.compat_path()
OURS = f"{COMPAT}/torch_memory_saver/__init__.py"
ADAPTER = "sglang.srt.utils.torch_memory_saver_adapter"

# Another torch_memory_saver, as a wheel would bring it, and SGLang's adapter.
WHEEL = """
class TorchMemorySaver:
    _impl = None
torch_memory_saver = TorchMemorySaver()
"""
ADAPTER_SOURCE = """
try:
    import torch_memory_saver
    _memory_saver = torch_memory_saver.torch_memory_saver
    import_error = None
except ImportError as e:
    import_error = e
"""
PLUG_IN = """
import importlib, importlib.metadata, os, sys
import sglang.srt.utils.torch_memory_saver_adapter as adapter
(entry,) = importlib.metadata.entry_points(group="sglang.srt.plugins", name="ebbtide")
entry.load()()
module = getattr(adapter, "torch_memory_saver", None)
print(module and module.__file__, adapter.import_error)
if module: assert adapter._memory_saver is module.torch_memory_saver
"""


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder for packages, before ebbtide's on the path."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(ebbtide.__file__).resolve().parents[1]}")
    for name in ("EBBTIDE_COMPAT", "SGLANG_PLUGINS", "LD_PRELOAD"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def add(site, name, text):
    path = site / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def wheel(site):
    add(site, "torch_memory_saver/__init__.py", WHEEL)
    add(site, "torch_memory_saver/utils.py", "is_wheel = True")
    return site


def add_sglang(site):
    for folder in ("sglang", "sglang/srt", "sglang/srt/utils"):
        add(site, f"{folder}/__init__.py", "")
    add(site, f"{ADAPTER.replace('.', '/')}.py", ADAPTER_SOURCE)


def output_of(run_python, code, **environment):
    done = run_python(code, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_environment_wins_over_a_wheel_and_reaches_children(wheel, run_python):
    code = """
    import multiprocessing, subprocess, sys
    import torch_memory_saver
    print(torch_memory_saver.__file__)
    sys.stdout.flush()
    subprocess.run([sys.executable, "-c", "import torch_memory_saver; print(torch_memory_saver.__file__)"], check=True)
    """
    assert output_of(run_python, code, **ebbtide.env(compat="tms")) == [OURS, OURS]


def test_install_takes_the_place_of_a_wheel_that_was_imported(wheel, run_python):
    code = """
    import sys, torch_memory_saver, torch_memory_saver.utils
    old = torch_memory_saver.torch_memory_saver
    from ebbtide.compat.torch_memory_saver import install
    module = install()
    assert install() is module is sys.modules["torch_memory_saver"]
    import torch_memory_saver.utils
    assert torch_memory_saver.torch_memory_saver is not old and not hasattr(torch_memory_saver.utils, "is_wheel")
    print(module.__file__, sys.path.count(sys.path[0]), sys.path[0])
    """
    assert output_of(run_python, code) == [f"{OURS} 1 {COMPAT}"]


def test_install_is_refused_where_a_wheel_is_in_use(wheel, run_python):
    code = """
    import torch_memory_saver
    from ebbtide.compat.torch_memory_saver import install
    from ebbtide.errors import StateError
    torch_memory_saver.torch_memory_saver._impl = object()
    try:
        install()
    except StateError as error:
        print(error)
    print(torch_memory_saver.__file__)
    """
    sentence, still = output_of(run_python, code)
    assert still == str(wheel / "torch_memory_saver/__init__.py") and f"of {still} holds memory already" in sentence


def test_what_multiprocessing_spawns_gets_the_installed_one(wheel, run_python):
    add(wheel, "child.py", "def name():\n    import torch_memory_saver\n    print(torch_memory_saver.__file__)\n")
    code = """
    import multiprocessing, child
    from ebbtide.compat.torch_memory_saver import install
    install()
    process = multiprocessing.get_context("spawn").Process(target=child.name)
    process.start(); process.join(); assert process.exitcode == 0
    """
    assert output_of(run_python, code) == [OURS]


@pytest.mark.parametrize(
    ("environment", "is_ours"),
    [
        ({}, False),
        ({"SGLANG_PLUGINS": "other"}, False),
        ({"EBBTIDE_COMPAT": "none"}, False),
        ({"EBBTIDE_COMPAT": "tms"}, True),
        ({"SGLANG_PLUGINS": "other, ebbtide"}, True),
    ],
)
def test_the_plug_in_acts_where_it_is_asked_for(wheel, run_python, environment, is_ours):
    add_sglang(wheel)
    expected = OURS if is_ours else str(wheel / "torch_memory_saver/__init__.py")
    assert output_of(run_python, PLUG_IN, **environment) == [f"{expected} None"]


def test_the_plug_in_serves_where_no_wheel_is_installed(site, run_python):
    add_sglang(site)
    assert output_of(run_python, PLUG_IN, SGLANG_PLUGINS="ebbtide") == [f"{OURS} None"]
    assert output_of(run_python, PLUG_IN)[0].startswith("None No module named")


def test_the_plug_in_comes_before_the_adapter_too(wheel, run_python):
    add_sglang(wheel)
    code = "from ebbtide.compat.torch_memory_saver import plug_into_sglang as plug\nplug()\n" + PLUG_IN
    assert output_of(run_python, code, EBBTIDE_COMPAT="tms") == [f"{OURS} None"]


def test_the_entry_point_is_installed():
    (entry,) = metadata.entry_points(group="sglang.srt.plugins", name="ebbtide")
    assert callable(entry.load())


def doctor_says(run_python, **environment):
    code = "from ebbtide.cli import main\nimport sys\nsys.argv = ['ebbtide', 'doctor', '--json']\nmain()"
    # Without a driver, it needs no torch.
    found = json.loads(run_python(code, EBBTIDE_DRIVER="off", **environment).stdout)["findings"]
    (row,) = [row for row in found if row["section"] == "compatibility"]
    assert row["name"] == "torch_memory_saver" and row["status"] == "ok"
    return row["found"], row["advice"]


def test_doctor_says_whose_an_import_would_be(site, run_python):
    assert doctor_says(run_python) == ("none: `ebbtide run --compat tms` gives ebbtide's", "")
    add(site, "torch_memory_saver/__init__.py", "raise SystemExit('doctor imports nothing')")
    found, advice = doctor_says(run_python)
    assert found == f"another one, {site}/torch_memory_saver/__init__.py" and "--compat tms" in advice
    environment = {name: value for name, value in ebbtide.env(compat="tms").items() if name != "LD_PRELOAD"}
    assert doctor_says(run_python, **environment) == (f"ebbtide's, {OURS}", "")


def test_the_module_needs_no_torch_to_be_imported(site, run_python):
    """Launchers import it to find the library."""
    code = f"""
    import sys
    sys.path.insert(0, {str(COMPAT)!r})
    sys.modules["torch"] = None
    import torch_memory_saver
    from torch_memory_saver.utils import get_binary_path_from_package
    print(get_binary_path_from_package("torch_memory_saver_hook_mode_preload"))
    """
    assert output_of(run_python, code) == [f"{COMPAT}/{preloading.TMS_LIBRARY_NAMES[0]}"]


def test_configure_subprocess_changes_the_environment_for_the_length_of_its_block(monkeypatch, saver):
    monkeypatch.syspath_prepend(str(COMPAT))
    own = str(Path(ebbtide.__file__).resolve().with_name(preloading.LIBRARY_NAME))
    monkeypatch.setenv("LD_PRELOAD", f"libm.so.6:{own}")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    from torch_memory_saver import configure_subprocess

    with pytest.raises(KeyError), configure_subprocess():
        # One copy of the library, whichever name it had.
        assert os.environ["LD_PRELOAD"] == f"{COMPAT / preloading.TMS_LIBRARY_NAMES[0]}:libm.so.6"
        assert os.environ["PYTHONPATH"] == str(COMPAT)
        raise KeyError
    assert os.environ["LD_PRELOAD"] == f"libm.so.6:{own}" and "PYTHONPATH" not in os.environ
    forget_module()


def test_configure_subprocess_tells_children_of_torch_for_rocm_that_the_driver_is_hip(monkeypatch, saver):
    """The preload library, which can't know that, does nothing then."""
    monkeypatch.syspath_prepend(str(COMPAT))
    from torch_memory_saver import configure_subprocess

    with monkeypatch.context() as changes:
        changes.delenv("EBBTIDE_DRIVER")
        changes.setattr(driver_choice, "_is_rocm_installed", lambda: True)
        with configure_subprocess():
            assert os.environ["EBBTIDE_DRIVER"] == "hip"
        assert "EBBTIDE_DRIVER" not in os.environ
    forget_module()


def forget_module():
    for name in [name for name in sys.modules if name.startswith("torch_memory_saver")]:
        del sys.modules[name]


def test_a_library_that_is_missing_is_said(tmp_path, monkeypatch, saver):
    monkeypatch.syspath_prepend(str(COMPAT))
    from torch_memory_saver import utils

    monkeypatch.setattr(utils, "__file__", str(tmp_path / "package" / "utils.py"))
    with pytest.raises(RuntimeError, match=r"there is no any\.abi3\.so in .*: install ebbtide again"):
        utils.get_binary_path_from_package("any")
    forget_module()


def test_every_call_does_nothing_where_ebbtide_is_off(run_python):
    code = """
    import torch
    from ebbtide.compat.torch_memory_saver import install
    install()
    from torch_memory_saver import torch_memory_saver as tms
    from torch_memory_saver.testing_utils import get_and_print_gpu_memory
    with tms.region(tag="a", enable_cpu_backup=True), tms.disable():
        tensor = torch.ones(3)
    tms.pause(); tms.resume()
    tms.memory_margin_bytes = 5
    assert tms.get_cpu_backup(tensor) is None
    print(get_and_print_gpu_memory("now") >= 0)
    """
    assert output_of(run_python, code, EBBTIDE_DRIVER="off")[-1] == "True"
