"""Settings: one list, one parser, and the same sentence wherever a user meets a bad value."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from checks.settings import BAD_VARIABLES, PATHS, bad_values, sentences
from ebbtide import _core, driver_choice, settings
from ebbtide.cli import diagnosis
from ebbtide.errors import StoreError
from ebbtide.launch import run_options

CONFIGURABLE = [setting for setting in settings.all_settings() if setting.is_configurable]
REGION = """
import torch
import ebbtide
from ebbtide import saver
try:
    with saver.region("x"):
        pass
except ValueError as error:
    print(error)
"""


@pytest.fixture
def clean(monkeypatch):
    """Unsets every variable of ebbtide, and makes the next check read them anew."""
    for name in [name for name in os.environ if name.startswith("EBBTIDE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(settings, "_environment_is_checked", False)
    return monkeypatch


@pytest.fixture
def doctor(forked_command):
    """What `ebbtide doctor` finds with these variables of ebbtide alone."""
    unset = dict.fromkeys(name for name in os.environ if name.startswith("EBBTIDE_"))

    def run(**environment):
        result = forked_command("doctor", "--json", **{**unset, **environment})
        data = json.loads(result.stdout)
        assert result.returncode == (0 if data["usable"] else 1)
        return data["findings"], result.stderr

    return run


# --- the list ---


def test_every_entry_says_something():
    everything = settings.all_settings()
    assert len({setting.variable for setting in everything}) == len(everything) > 25
    for setting in everything:
        assert setting.variable == f"EBBTIDE_{setting.name.upper()}"
        assert setting.fallback and setting.readers and setting.meaning.endswith(".")
        assert bool(setting.none) <= setting.is_configurable
        if " " not in setting.fallback and setting.kind != "size":
            assert settings.check(setting, setting.fallback, "x") == setting.fallback


def test_every_setting_is_read_by_those_who_are_said_to_and_nothing_else_reads_a_variable(root: Path):
    """C++ reads a setting by its name in settings.def, Python by its own name."""
    native = "\n".join(path.read_text() for path in (root / "csrc").rglob("*.cpp"))
    names = dict(re.findall(r'EBBTIDE_SETTING\((k\w+), "(\w+)"', (root / "csrc/base/settings.def").read_text()))
    python = "\n".join(path.read_text() for path in (root / "python").rglob("*.py"))
    for constant, name in names.items():
        readers = settings.find(name).readers.split()
        in_native = re.search(rf"Setting::{constant}\b", native) is not None
        in_python = (
            re.search(rf'"{name}", (?:os\.)?environ|"EBBTIDE_{name.upper()}"|\("{name}", \{{', python) is not None
        )
        assert in_native == bool({"core", "preload", "simulator"} & set(readers)), name
        assert in_python == ("python" in readers), name
    assert re.findall(r'getenv\("(EBBTIDE_\w+)"', native) == []


def test_each_has_a_bad_value_in_the_tests():
    assert set(BAD_VARIABLES) | PATHS == {setting.variable for setting in settings.all_settings()}
    assert set(get_args(driver_choice.Setting)) == set(settings.find("driver").choices)


# --- the same sentence everywhere; tests/preload has the case of the preloaded program ---


@pytest.mark.parametrize("variable", BAD_VARIABLES)
def test_a_bad_variable_is_the_same_error_at_run_time_and_in_run(clean, variable):
    value, _ = BAD_VARIABLES[variable]
    clean.setenv(variable, value)
    expected = f"^{re.escape(sentences()[variable])}$"
    for use in (
        settings.check_environment,
        settings.check_environment,  # the second check fails as the first
        lambda: run_options.to_variables({}, os.environ),
        lambda: settings.read(variable.removeprefix("EBBTIDE_").lower(), os.environ),
    ):
        with pytest.raises(ValueError, match=expected):
            use()
    clean.setenv(variable, "")
    settings.check_environment()
    assert run_options.to_variables({}, os.environ) == {}


MISSPELT = {"EBBTIDE_DEVICE_LIMT": "EBBTIDE_DEVICE_LIMIT", "EBBTIDE_LMS_MINSIZE": "EBBTIDE_LMS_MIN_SIZE"}


def test_misspelt_variables_are_noticed_and_others_are_nobodys_business(run_python):
    variables = {**dict.fromkeys(MISSPELT, "1GiB"), "EBBTIDE_TEST_DRIVER": "sim", "EBBTIDE_WEATHER": "fine"}
    assert settings.misspelt(variables) == MISSPELT
    assert settings.misspelt({setting.variable: "" for setting in settings.all_settings()}) == {}
    expected = [f"{name} is none of ebbtide's variables; is {meant} meant?" for name, meant in MISSPELT.items()]
    code = "import torch\nfrom ebbtide import saver\nfor _ in range(2):\n    with saver.region('x'):\n        pass"
    result = run_python(code, **variables)
    assert result.returncode == 0
    assert [result.stderr.count(f"RuntimeWarning: {line}") for line in expected] == [1, 1], result.stderr
    plain = {name: value for name, value in os.environ.items() if not name.startswith("EBBTIDE_")}
    command = [sys.executable, "-m", "ebbtide.cli", "run", "--", sys.executable, "-c", "print('ran')"]
    done = subprocess.run(command, env=plain | variables, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "ran\n")
    assert done.stderr.splitlines() == [f"ebbtide: {line}" for line in expected]


def test_doctor_says_of_each_what_the_run_would(doctor):
    findings, error = doctor(**bad_values())
    found = {each["name"]: each for each in findings if each["section"] == "settings" and each["status"] == "problem"}
    assert {name: each["found"] for name, each in found.items()} == sentences()
    assert all(each["advice"] == f"correct {name}, or unset it" for name, each in found.items())
    assert "is ignored" not in error


@pytest.mark.parametrize("variable", ["EBBTIDE_COPY_THREADS", "EBBTIDE_SIM_CAPACITY", "EBBTIDE_CHECK"])
def test_a_region_raises_it(run_python, variable):
    result = run_python(REGION, **{variable: BAD_VARIABLES[variable][0]})
    assert (result.stdout, result.stderr) == (sentences()[variable] + "\n", "")


@pytest.mark.parametrize("setting", CONFIGURABLE, ids=lambda setting: setting.name)
def test_configure_refuses_with_the_same_words_and_sets_nothing(saver, setting):
    before = _core.get_setting("device_limit")
    if setting.variable in BAD_VARIABLES and setting.kind == "size":
        value, words = BAD_VARIABLES[setting.variable]
        with pytest.raises(ValueError, match=f"^{re.escape(setting.name + words)}$"):
            saver.configure(**{"device_limit": 12345678, setting.name: value})
    kind_of_error = ValueError if setting.kind == "choice" else TypeError
    for wrong in (object(), b"1", 1.5 if setting.kind == "size" else "1" if setting.kind != "folder" else 1):
        with pytest.raises(kind_of_error, match=f"^{setting.name} must be "):
            saver.configure(**{"device_limit": 12345678, setting.name: wrong})
    if not setting.none:
        with pytest.raises(kind_of_error, match=f"^{setting.name} must be .*None"):
            saver.configure(**{setting.name: None})
    assert _core.get_setting("device_limit") == before


# --- folders ---


def test_a_folder_is_looked_at_when_it_is_chosen(saver, clean, tmp_path):
    saver.configure(disk_directory=None)  # a folder that was configured before comes before the variable
    (tmp_path / "file").write_text("")
    for bad, words in {
        str(tmp_path / "missing"): "make that directory",
        str(tmp_path / "file"): "make that directory",
        "/dev/shm": "is no disk but RAM",
        "/proc/self": "no file for a backup can be made",
    }.items():
        before = _core.get_setting("disk_directory")
        with pytest.raises(StoreError, match=words) as refused:
            saver.configure(device_limit=1, disk_directory=bad)
        assert "saver.configure(disk_directory=...)" in str(refused.value)
        assert _core.get_setting("disk_directory") == before and _core.get_setting("device_limit") != b"1"
        clean.setenv("EBBTIDE_DISK_DIRECTORY", bad)
        clean.setattr(settings, "_environment_is_checked", False)  # configure may have been the first to check it
        for use in (settings.check_environment, lambda: run_options.to_variables({}, os.environ)):
            with pytest.raises(ValueError, match=words) as said:
                use()
            assert "set EBBTIDE_DISK_DIRECTORY to another" in str(said.value)
        (finding,) = [each for each in diagnosis._settings() if each.name == "EBBTIDE_DISK_DIRECTORY"]
        assert (finding.status, finding.found) == ("problem", str(said.value))
        clean.delenv("EBBTIDE_DISK_DIRECTORY")
    with pytest.raises(ValueError, match=r"^disk_directory must be a path, and not empty$"):
        saver.configure(disk_directory="")


def test_a_folder_in_memory_is_one_for_files_that_are_wanted_to_be_seen(saver, clean, tmp_path):
    before = _core.get_setting("disk_directory")
    for files in ("hidden", "named"):
        with pytest.raises(StoreError, match="make that directory"):
            saver.configure(device_limit=1, disk_files=files, disk_directory=tmp_path / "missing")
    with pytest.raises(StoreError, match="is no disk but RAM"):
        saver.configure(device_limit=1, disk_files="hidden", disk_directory="/dev/shm")
    with pytest.raises(ValueError, match=r"^disk_directory must be a path, and not empty$"):
        saver.configure(disk_files="named", disk_directory="")
    assert _core.get_setting("disk_directory") == before and _core.get_setting("device_limit") != b"1"
    with pytest.raises(StoreError, match="is no disk but RAM"):
        saver.configure(disk_directory="/dev/shm")  # the kind of file was not set either
    try:
        saver.configure(disk_files="named", disk_directory="/dev/shm")
        assert _core.get_setting("disk_directory") == b"/dev/shm"
        saver.configure(disk_directory="/dev/shm")
    finally:
        saver.configure(disk_files="hidden", disk_directory=None)
    clean.setenv("EBBTIDE_DISK_DIRECTORY", "/dev/shm")
    assert "is no disk but RAM" in settings.problems()["disk_directory"]


@pytest.mark.parametrize("folder", ["/dev/shm", "missing"])
def test_settings_can_be_set_again_where_the_folder_of_the_system_is_of_no_use(saver, clean, tmp_path, folder):
    clean.setenv("TMPDIR", folder if folder.startswith("/") else str(tmp_path / folder))
    before = saver.settings()
    assert before["disk_directory"] is None
    saver.configure(device_limit="16GiB", skip_clean=False)
    saver.configure(**before)
    assert saver.settings() == before


def test_a_setting_that_the_core_refuses_leaves_all_as_they_were(saver, clean):
    before, configure, calls = saver.settings(), _core.configure, []

    def refuse(name, text):
        calls.append(name)
        if calls == ["device_limit", "host_margin", "skip_clean"]:
            raise StoreError("refused")
        configure(name, text)

    clean.setattr(_core, "configure", refuse)
    with pytest.raises(StoreError, match="refused"):
        saver.configure(device_limit="16GiB", host_margin="2GiB", skip_clean=False)
    assert saver.settings() == before


def test_what_the_system_chose_is_a_note_of_doctors(clean, doctor, tmp_path):
    findings, _ = doctor(TMPDIR=str(tmp_path / "missing"))
    (finding,) = [each for each in findings if each["name"] == "disk backups"]
    assert (
        finding["status"] == "note" and "missing" in finding["found"] and "EBBTIDE_DISK_DIRECTORY" in finding["advice"]
    )


@pytest.mark.sim_only
def test_doctor_sees_a_cache_that_can_not_be_written(doctor, tmp_path):
    (tmp_path / "file").write_text("")
    findings, _ = doctor(EBBTIDE_DRIVER="sim", EBBTIDE_CACHE_DIR=str(tmp_path / "file" / "cache"))
    (problem,) = [each for each in findings if each["status"] == "problem"]
    assert problem["section"] == "torch extension" and "can't be written (Not a directory)" in problem["found"]
    assert problem["advice"] == "set EBBTIDE_CACHE_DIR to a folder that can"


# --- errors name the limit in force ---


def test_a_shortage_names_what_set_the_limit(run_python):
    program = """
        from ebbtide import _core
        from ebbtide.errors import Error
        _core.use_driver("sim")
        def shortage():
            for act in (lambda: _core.alloc("a", 64 << 20), lambda: _core.pause(["b"])):
                try:
                    act()
                except Error as error:
                    print(error)
        _core.alloc("b", 4 << 20)
        shortage()
        for names in (("device_limit", "host_limit"), ("host_margin",)):
            for name in names:
                _core.configure(name, str(8 << 20 if name == "device_limit" else 2 << 20).encode())
            shortage()
    """
    result = run_python(program, EBBTIDE_DEVICE_LIMIT="8MiB", EBBTIDE_HOST_LIMIT="2MiB", EBBTIDE_DRIVER="sim")
    by_variable = result.stdout.splitlines()
    assert len(by_variable) == 6, result.stderr
    device, host, _, half_configured, configured_device, configured_host = by_variable
    del by_variable[2:4]
    assert "change host_limit and host_margin. In Python: " in half_configured
    assert "left of device_limit 8 MiB (EBBTIDE_DEVICE_LIMIT). Pause a tag, or raise device_limit" in device
    assert "limit 2 MiB by EBBTIDE_HOST_LIMIT, margin" in host and "by default" in host
    limit, margin = "host_limit (EBBTIDE_HOST_LIMIT, --host-limit)", "host_margin (EBBTIDE_HOST_MARGIN, --host-margin)"
    assert f"change {limit} and {margin}. In Python: " in host
    assert "device_limit 8 MiB (configured). Pause a tag, or raise device_limit, or" in configured_device
    assert "limit 2 MiB as configured, margin 2 MiB as configured" in configured_host
    assert "change host_limit and host_margin. In Python: " in configured_host
    for line in by_variable:
        assert ("saver.configure(host_limit=..., host_margin=...)" in line) == (line in (host, configured_host))
        assert ("saver.configure(device_limit=...)" in line) == (line in (device, configured_device))
    assert "EBBTIDE_" not in configured_device + configured_host
