"""`ebbtide.env`, `ebbtide.preloaded`, and the findings of `ebbtide doctor` about preloading."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import ebbtide
import pytest
from ebbtide.launch import preloading, run_options
from ebbtide.launch.preloading import with_first
from ebbtide.settings import all_settings
from hypothesis import given
from hypothesis import strategies as st

LIBRARY = Path(ebbtide.__file__).resolve().with_name("libebbtide_preload.so")
UNIFIED_MEMORY = "GGML_CUDA_ENABLE_UNIFIED_MEMORY"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch, tmp_path):
    """Removes ebbtide's settings, and gives the test a folder for ledgers."""
    for name in [name for name in os.environ if name.startswith(("EBBTIDE_", "LD_PRELOAD"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("EBBTIDE_LEDGER", str(tmp_path / "ledger"))


def command_line(*arguments):
    return [sys.executable, "-m", "ebbtide.cli", *arguments]


def environment_seen_by(command):
    out = subprocess.run(command, capture_output=True, check=True).stdout
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in (e.partition(b"=") for e in out.split(b"\0"))}


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ({}, []),
        ({"overflow": None}, ["--overflow", "none"]),
        ({"overflow": "managed", "reserve": 1 << 20}, ["--overflow", "managed", "--reserve", "1MiB"]),
        (
            {"pauseable": True, "tag": "job", "backup": None, "summary": False, "log": "error"},
            ["--pauseable", "--tag", "job", "--backup", "none", "--no-summary", "--log", "error"],
        ),
        (
            {"device_limit": "2GB", "host_limit": "1GiB", "host_margin": 0, "host_pool": "1MiB"},
            ["--device-limit", "2GB", "--host-limit", "1GiB", "--host-margin", "0", "--host-pool", "1MiB"],
        ),
        ({"lms": 1 << 30, "lms_min_size": "4KiB"}, ["--lms", "1GiB", "--lms-min-size", "4096"]),
        (
            {"lms": 1 << 30, "lms_recompute": "auto", "lms_overflow": True},
            ["--lms", "1GiB", "--lms-recompute", "auto", "--lms-overflow"],
        ),
        ({"compat": "tms"}, ["--compat", "tms"]),
        ({"compat": "tms", "overflow": "split", "lms": 0}, ["--compat", "tms", "--overflow", "split", "--lms", "0"]),
        ({"compat": None}, ["--compat", "none"]),
    ],
)
def test_env_and_preloaded_are_what_the_command_sets(options, arguments, monkeypatch):
    monkeypatch.setenv("LD_PRELOAD", "libm.so.6")
    plain = environment_seen_by(["env", "-0"])
    under_run = environment_seen_by(command_line("run", *arguments, "--", "env", "-0"))
    assert plain | ebbtide.env(**options) == under_run
    with ebbtide.preloaded(**options) as added:
        assert added == ebbtide.env(**options)
        assert environment_seen_by(["env", "-0"]) == under_run
    assert environment_seen_by(["env", "-0"]) == plain


def test_preloaded_puts_everything_back(monkeypatch, capfd):
    monkeypatch.setenv(UNIFIED_MEMORY, "1")
    monkeypatch.setenv("EBBTIDE_RESERVE", "5")
    before = dict(os.environ)
    with pytest.raises(KeyError, match="inside"):
        with ebbtide.preloaded(reserve="1MiB", summary=True):
            assert os.environ["EBBTIDE_RESERVE"] == str(1 << 20) and UNIFIED_MEMORY not in os.environ
            with ebbtide.preloaded(reserve=7):
                assert os.environ["EBBTIDE_RESERVE"] == "7" and os.environ["EBBTIDE_SUMMARY"] == "1"
                assert os.environ["LD_PRELOAD"] == str(LIBRARY)
            assert os.environ["EBBTIDE_RESERVE"] == str(1 << 20)
            raise KeyError("inside")
    assert dict(os.environ) == before
    assert capfd.readouterr().err.count("is unset") == 1


def test_a_refused_option_leaves_the_environment_alone(monkeypatch):
    monkeypatch.setenv(UNIFIED_MEMORY, "1")
    before = dict(os.environ)
    with pytest.raises(ValueError, match="reserve"), ebbtide.preloaded(reserve="5x"):
        pass
    assert dict(os.environ) == before


def test_env_changes_nothing(tmp_path):
    before = dict(os.environ)
    ebbtide.env(pauseable=True, tag="job")
    assert dict(os.environ) == before and not (tmp_path / "ledger").exists()


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"device_limits": 1}, TypeError, "there is no option 'device_limits'; the options are overflow, device_limit"),
        ({"device_limit": True}, TypeError, "device_limit must be a size"),
        ({"device_limit": None}, TypeError, "device_limit must be a size"),
        ({"device_limit": 1.5}, TypeError, "device_limit must be a size"),
        ({"device_limit": -1}, ValueError, "device_limit must not be negative"),
        ({"summary": 1}, TypeError, "summary must be True or False"),
        ({"summary": "yes"}, ValueError, "summary must be 0 or 1, not 'yes'"),
        ({"overflow": 1}, ValueError, "overflow must be one of"),
        ({"report": None}, ValueError, "report must be one of device, free, total, not None"),
        ({"pauseable": True, "tag": 5}, TypeError, "a tag is a str"),
        ({"tag": "job"}, ValueError, "tag means nothing without pauseable"),
        ({"lms": True}, TypeError, "lms must be a size"),
        ({"lms": "5x"}, ValueError, "lms has the unknown unit 'x'"),
        ({"lms_min_size": 5}, ValueError, "lms_min_size means nothing without lms: give both or neither"),
        ({"lms_recompute": "auto"}, ValueError, "lms_recompute means nothing without lms: give both or neither"),
        ({"lms": 5, "lms_recompute": True}, ValueError, "lms_recompute must be one of auto, none"),
        ({"lms": 5, "pauseable": True}, ValueError, "lms and pauseable each tag all of a program's memory: leave one"),
        ({"host_pool": 2, "host_limit": 1}, ValueError, "host_pool is 2 B, and host_limit allows 1 B"),
    ],
)
def test_env_refuses_with_a_sentence(options, error, sentence):
    with pytest.raises(error, match=f"^{re.escape(sentence)}"):
        ebbtide.env(**options)


def test_every_choice_and_its_absence(monkeypatch):
    """An option that is not given is not set, whatever the environment says."""
    for option in run_options.options():
        assert option.variable not in ebbtide.env()
        for choice in option.form.split("|") if "|" in option.form else []:
            needs = {"backup": {"pauseable": True}, "lms_recompute": {"lms": 0}}.get(option.name, {})
            assert ebbtide.env(**{option.name: choice}, **needs)[option.variable] == choice
    monkeypatch.setenv("EBBTIDE_HOST_LIMIT", "5")
    assert "EBBTIDE_HOST_LIMIT" not in ebbtide.env()
    with pytest.raises(ValueError, match="host_pool is 6 B, and EBBTIDE_HOST_LIMIT allows 5 B"):
        ebbtide.env(host_pool=6)


def test_the_largest_host_sizes_are_this_machines(monkeypatch):
    ram_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert ebbtide.env(host_limit=ram_bytes)["EBBTIDE_HOST_LIMIT"] == str(ram_bytes)
    with pytest.raises(ValueError, match="of RAM: ask for less"):
        ebbtide.env(host_limit=ram_bytes + 1)
    monkeypatch.setenv("EBBTIDE_HOST_LIMIT", "4096TiB")  # the core takes the smallest limit anyway
    assert ebbtide.env()


@given(st.lists(st.sampled_from(["libm.so.6", "/lib/libx.so", str(LIBRARY), f"/old/{LIBRARY.name}"]), max_size=6))
def test_ours_is_first_and_once_and_the_others_keep_their_order(entries):
    for separator in (":", " ", " : ", "::"):
        result = preloading.preload_list(LIBRARY, separator.join(entries)).split(":")
        assert result == [str(LIBRARY), *(entry for entry in entries if not entry.endswith(LIBRARY.name))]
        assert preloading.preload_list(LIBRARY, ":".join(result)).split(":") == result


STARTUP = preloading.startup_path()


@pytest.mark.parametrize(
    ("inherited", "result"),
    [
        ("", f"{STARTUP}"),
        ("a:/b", f"{STARTUP}:a:/b"),
        ("a:", f"{STARTUP}:a:"),  # the last entry is the working directory
        (f"{STARTUP}:a", f"{STARTUP}:a"),
        (f"a:{STARTUP}", f"{STARTUP}:a"),
        (f"{STARTUP}", f"{STARTUP}"),
    ],
)
def test_our_modules_are_first_and_once_and_the_users_path_goes_on(inherited, result):
    assert with_first(str(STARTUP), inherited) == result


def test_only_large_model_support_needs_modules_of_ours(monkeypatch):
    assert (STARTUP / "sitecustomize.py").is_file()
    assert "PYTHONPATH" not in ebbtide.env(overflow="split")
    monkeypatch.setenv("EBBTIDE_LMS", "5")  # set by hand, or by an outer run
    assert "PYTHONPATH" in ebbtide.env()
    assert "EBBTIDE_LMS" not in ebbtide.env()


# --- programs for torch_memory_saver ---

COMPAT = LIBRARY.parent / "compat" / "tms"
TMS_LIBRARY = str(COMPAT / "torch_memory_saver_hook_mode_preload.abi3.so")


def test_compat_gives_the_module_the_library_by_its_name_and_no_overflow(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/mine")
    monkeypatch.setenv("LD_PRELOAD", f"/wheel/{Path(TMS_LIBRARY).name}:libm.so.6:{LIBRARY}")
    added = ebbtide.env(compat="tms")
    assert added["LD_PRELOAD"] == f"{TMS_LIBRARY}:libm.so.6"
    assert added["PYTHONPATH"] == f"{COMPAT}:/mine"
    assert (added["EBBTIDE_COMPAT"], added["EBBTIDE_OVERFLOW"]) == ("tms", "none")
    monkeypatch.setenv("EBBTIDE_OVERFLOW", "whole")
    assert ebbtide.env(compat="tms")["EBBTIDE_OVERFLOW"] == "whole"
    assert ebbtide.env(compat="tms", overflow="split")["EBBTIDE_OVERFLOW"] == "split"


def test_a_run_inside_a_run_with_compat_goes_on_with_it(monkeypatch):
    monkeypatch.setenv("EBBTIDE_COMPAT", "tms")
    monkeypatch.setenv("LD_PRELOAD", TMS_LIBRARY)
    monkeypatch.setenv("PYTHONPATH", str(COMPAT))
    added = ebbtide.env(reserve=5)
    assert (added["LD_PRELOAD"], added["PYTHONPATH"]) == (TMS_LIBRARY, str(COMPAT))
    assert "EBBTIDE_COMPAT" not in added


def test_a_run_without_compat_inside_one_with_it_has_the_programs_own_modules(monkeypatch):
    monkeypatch.setenv("EBBTIDE_COMPAT", "tms")
    monkeypatch.setenv("LD_PRELOAD", TMS_LIBRARY)
    monkeypatch.setenv("PYTHONPATH", f"/mine:{COMPAT}::/other")
    added = ebbtide.env(compat=None)
    assert (added["LD_PRELOAD"], added["PYTHONPATH"]) == (str(LIBRARY), "/mine::/other")
    assert added["EBBTIDE_COMPAT"] == "none"
    assert ebbtide.env(compat=None, lms=0)["PYTHONPATH"] == f"{STARTUP}:/mine::/other"
    monkeypatch.setenv("PYTHONPATH", str(COMPAT))
    assert ebbtide.env(compat=None)["PYTHONPATH"] == ""


def test_another_librarys_hooks_stay_where_nobody_asks_for_compat():
    wheel = f"/wheel/{Path(TMS_LIBRARY).name}"
    assert preloading.preload_list(LIBRARY, f"{wheel}:{TMS_LIBRARY}") == f"{LIBRARY}:{wheel}"


def test_lms_and_compat_each_have_their_folder():
    assert ebbtide.env(compat="tms", lms=0)["PYTHONPATH"].split(":")[:2] == [str(STARTUP), str(COMPAT)]


@pytest.mark.parametrize("name", preloading.TMS_LIBRARY_NAMES)
def test_the_library_is_whole_under_each_name(name):
    assert (COMPAT / name).read_bytes() == LIBRARY.read_bytes()
    assert preloading.is_preload_library(COMPAT / name) and preloading.is_preload_library(LIBRARY)
    assert not preloading.is_preload_library(LIBRARY.with_name("libebbtide.so"))


# --- a package without the library, or with a path that the loader cannot use ---


@pytest.fixture
def copy_package(tmp_path):
    """Copies the package into a folder of that name. Returns the PYTHONPATH for it."""

    def copy(folder, *left_out):
        shutil.copytree(
            LIBRARY.parent, tmp_path / folder / "ebbtide", ignore=shutil.ignore_patterns("__pycache__", *left_out)
        )
        return str(tmp_path / folder)

    return copy


@pytest.mark.parametrize(
    ("folder", "left_out", "sentence"),
    [
        ("package", [LIBRARY.name], "the preload library is missing"),
        ("with space", [], "LD_PRELOAD takes no path with spaces or colons"),
    ],
)
def test_a_library_that_can_not_be_preloaded_is_said(copy_package, folder, left_out, sentence):
    settings = {**os.environ, "PYTHONPATH": copy_package(folder, *left_out), "EBBTIDE_DRIVER": "off"}
    result = subprocess.run(
        command_line("run", "--", "true"), env=settings, capture_output=True, text=True, check=False
    )
    assert result.returncode == 1 and result.stderr.startswith(f"Error: {sentence}")
    assert result.stderr.count("\n") == 1
    doctor = subprocess.run(command_line("doctor", "--json"), env=settings, capture_output=True, check=True)
    (finding,) = [row for row in json.loads(doctor.stdout)["findings"] if row["section"] == "preloading"]
    assert sentence in finding["found"] and "install ebbtide" in finding["advice"]


def preloading_findings(*command, **settings):
    environment = {**os.environ, "EBBTIDE_DRIVER": "off", **settings}
    result = subprocess.run(
        [*command, *command_line("doctor", "--json")], env=environment, capture_output=True, check=False
    )
    rows = json.loads(result.stdout)["findings"]
    return {row["name"]: row for row in rows if row["section"] == "preloading"}


def test_doctor_says_whether_this_process_is_preloaded():
    found = preloading_findings()
    assert found["library"]["found"] == str(LIBRARY) and "this Python" not in found
    assert found["this process"]["found"].startswith("not preloaded")
    found = preloading_findings(*command_line("run", "--"))
    assert (found["this process"]["found"], found["this process"]["status"]) == ("preloaded, and not active", "ok")
    found = preloading_findings(LD_PRELOAD=str(LIBRARY), EBBTIDE_DRIVER="auto")  # set by hand
    assert found["this process"]["found"] == "preloaded"
    found = preloading_findings(LD_PRELOAD=f"/nowhere/{LIBRARY.name}")
    assert found["this process"]["status"] == "note" and "was not loaded" in found["this process"]["found"]


def test_the_options_are_settings():
    assert [option.name for option in run_options.options()] == [
        setting.name for setting in all_settings() if setting.is_run_option
    ]
    shown = subprocess.run(command_line("run", "--help"), capture_output=True, text=True, check=True).stdout
    for option in run_options.options():
        assert f"--{option.name.replace('_', '-')}" in shown and option.variable in shown
        assert "1:" not in option.meaning and "0:" not in option.meaning.partition("; ")[0]
