"""`ebbtide compat`: ebbtide's torch_memory_saver where a launcher replaces PYTHONPATH for its workers."""

import json
import os

import ebbtide
import pytest
from click.testing import CliRunner
from ebbtide.cli import main
from ebbtide.launch import preloading, site_files

OURS = f"{preloading.compat_path()}/torch_memory_saver/__init__.py"
ASK = "import torch_memory_saver; print(torch_memory_saver.__file__)"


@pytest.fixture
def imported(environment):
    """The file that an import gives in a worker whose PYTHONPATH is replaced."""
    environment.add_wheel()

    def ask(**variables):
        chosen = {**ebbtide.env(compat="tms"), "LD_PRELOAD": "", "PYTHONPATH": "/path/to/Megatron-LM/", **variables}
        return environment.run("-c", ASK, **chosen).strip()

    return ask


def test_the_variable_alone_is_enough_once_the_file_is_there(environment, imported):
    wheel = imported()
    assert wheel.startswith(str(environment.packages))
    said = environment.ebbtide("compat", "install", "tms")
    assert said == environment.ebbtide("compat", "install", "tms") and str(environment.packages) in said
    assert imported() == imported(EBBTIDE_COMPAT=" TMS ") == OURS
    assert imported(EBBTIDE_COMPAT="none") == imported(EBBTIDE_COMPAT="") == wheel
    assert environment.ebbtide("compat", "uninstall", "tms").endswith("is removed\n")
    assert imported() == wheel
    assert environment.ebbtide("compat", "uninstall", "tms") == "nothing was installed for tms\n"


def test_the_file_of_an_ebbtide_that_is_gone_does_nothing(environment, imported):
    text = site_files.startup_line().replace(str(preloading.compat_path()), "/nowhere")
    (environment.packages / site_files.STARTUP_FILE).write_text(text)
    assert imported().startswith(str(environment.packages))


def test_doctor_shows_the_file(environment):
    def shown():
        # Without a driver, it needs no torch.
        said = environment.run("-m", "ebbtide.cli", "doctor", "--json", EBBTIDE_DRIVER="off")
        findings = json.loads(said)["findings"]
        return [(row["status"], row["found"], row["advice"]) for row in findings if row["name"] == "start-up file"]

    assert shown() == []
    environment.ebbtide("compat", "install", "tms")
    file = environment.packages / site_files.STARTUP_FILE
    assert shown() == [("ok", f"{file}: EBBTIDE_COMPAT=tms gives ebbtide's", "")]
    file.write_text("")
    assert shown() == [("note", f"{file} is another ebbtide's", "`ebbtide compat install tms` writes it again")]


def test_a_folder_that_can_not_be_written_is_said(monkeypatch, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setattr(site_files, "site", lambda: file)
    for command, advice in (("install", f"put {preloading.compat_path()} first"), ("uninstall", "remove it yourself")):
        done = CliRunner().invoke(main, ["compat", command, "tms"])
        assert done.exit_code == 1 and advice in done.output.replace(os.linesep, " "), done.output
