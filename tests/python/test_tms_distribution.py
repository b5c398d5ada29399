"""`ebbtide compat provide tms`: what pip knows of torch_memory_saver, and what an import gives, in every order."""

import importlib.util
import json
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner
from ebbtide.cli import main
from ebbtide.launch import preloading, site_files

pytestmark = pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="this Python has no pip")

OURS = f"{preloading.compat_path()}/torch_memory_saver/__init__.py"
ASK = "import torch_memory_saver; print(torch_memory_saver.__file__)"


def make_wheel(folder: Path, name: str, version: str, requires: str = "", module: str = "") -> None:
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += f"Requires-Dist: {requires}\n" if requires else ""
    files = {
        f"{info}/METADATA": metadata,
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{name}/__init__.py": module,
    }
    files[f"{info}/RECORD"] = "".join(f"{file},,\n" for file in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for file, text in files.items():
            wheel.writestr(file, text)


class Site:
    """An environment, and an index with torch_memory_saver and an engine that requires it, as SGLang does."""

    def __init__(self, environment, wheels):
        self._environment, self._wheels = environment, wheels
        self.ebbtide, self.packages = environment.ebbtide, environment.packages
        for version in ("0.0.10", "0.0.11"):
            make_wheel(wheels, "torch_memory_saver", version, module="torch_memory_saver = None\n")
        make_wheel(wheels, "engine", "0.1", "torch_memory_saver>=0.0.9.post1")
        make_wheel(wheels, "pinned_engine", "0.1", "torch_memory_saver==0.0.11")

    def pip(self, command, *arguments):
        source = ("--no-index", "--find-links", str(self._wheels)) if command == "install" else ()
        return self._environment.run("-m", "pip", "--disable-pip-version-check", command, *source, *arguments)

    def install(self, *names):
        return self.pip("install", *names)

    def complaints(self):
        """What `pip check` says of torch_memory_saver. The environment of the tests may have complaints of its own."""
        code = "import runpy, sys; sys.argv[1:] = ['check']; runpy.run_module('pip', run_name='__main__')"
        code = f"try:\n    exec({code!r})\nexcept SystemExit:\n    pass"
        lines = self._environment.run("-c", code).splitlines()
        return [line for line in lines if "torch-memory-saver" in line.replace("_", "-")]

    def imported(self, **variables):
        return self._environment.run("-c", ASK, **{"EBBTIDE_COMPAT": "none", **variables}).strip()

    def has_theirs(self):
        is_theirs = self.imported() == str(self.packages / "torch_memory_saver/__init__.py")
        return is_theirs and len(list(self.packages.glob("torch_memory_saver-*.dist-info"))) == 1

    def doctor(self):
        """What `ebbtide doctor` says of pip; without a driver, it needs no torch."""
        said = self._environment.run("-m", "ebbtide.cli", "doctor", "--json", EBBTIDE_DRIVER="off")
        return [(row["status"], row["found"]) for row in json.loads(said)["findings"] if row["name"] == "pip"]


@pytest.fixture
def site(environment, tmp_path):
    return Site(environment, tmp_path)


def test_ebbtide_first_then_a_program_that_requires_it(site):
    assert site.doctor() == []
    assert "pip takes torch_memory_saver 0.0.10 for installed" in site.ebbtide("compat", "provide", "tms")
    site.ebbtide("compat", "provide", "tms")  # as often as one likes
    assert site.doctor() == [("ok", "takes ebbtide's module for torch_memory_saver 0.0.10")]
    assert "already satisfied: torch_memory_saver" in site.install("engine")
    assert site.imported() == OURS
    site.install("pinned_engine")  # pip replaces it by the real one
    assert site.has_theirs()
    site.pip("uninstall", "-y", "torch_memory_saver")
    site.ebbtide("compat", "provide", "tms", "--version", "0.0.11")
    assert site.complaints() == [] and site.imported() == OURS
    assert site.ebbtide("compat", "uninstall", "tms").count("is removed") == 2
    assert sorted(line.split()[0].replace("-", "_") for line in site.complaints()) == ["engine", "pinned_engine"]
    site.ebbtide("compat", "provide", "tms")
    site.pip("uninstall", "-y", "torch_memory_saver")
    assert not list(site.packages.glob("*memory*saver*"))


def test_a_program_that_requires_it_first_then_ebbtide(site):
    site.install("engine")
    assert site.has_theirs()
    done = json.loads(site._environment.run("-c", REFUSED))
    assert done == [1, True], "the real one stays, and the error says what to do"
    assert site.has_theirs()
    site.ebbtide("compat", "install", "tms")
    assert site.imported(EBBTIDE_COMPAT="tms") == OURS and site.has_theirs()
    site.pip("uninstall", "-y", "torch_memory_saver")
    site.ebbtide("compat", "provide", "tms")
    assert site.imported() == OURS and site.complaints() == []
    assert site.ebbtide("compat", "uninstall", "tms").count("is removed") == 3


REFUSED = """
import json
from click.testing import CliRunner
from ebbtide.cli import main
done = CliRunner().invoke(main, ["compat", "provide", "tms"])
print(json.dumps([done.exit_code, "pip uninstall torch_memory_saver" in done.output.replace("\\n", " ")]))
"""


def test_what_is_no_version_is_said():
    done = CliRunner().invoke(main, ["compat", "provide", "tms", "--version", "../0.1"])
    assert done.exit_code != 0 and "a version is such as 0.0.10" in done.output


def test_a_folder_that_can_not_be_written_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(site_files, "site", lambda: tmp_path / "missing")
    monkeypatch.setattr(site_files, "installed", lambda: None)
    done = CliRunner().invoke(main, ["compat", "provide", "tms"])
    assert done.exit_code == 1 and "can't be written" in done.output.replace("\n", " "), done.output
