"""Docs move with the code: every path, symbol, variable, command, option and function that a page names exists."""

import importlib
import inspect
import re
from pathlib import Path

import pytest
from checks.docs import FENCE, Known, find_unknown_names, read_make_targets, variables_read, words_of


def pages_of(root: Path) -> list[Path]:
    names = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "csrc/README.md", "csrc/DESIGN.md"]
    names += ["python/README.md", "benchmarks/README.md"]
    return [*(root / name for name in names), *sorted((root / "docs").rglob("*.md"))]


def saver_signatures() -> dict[str, set[str] | None]:
    """Public names of ebbtide.saver -> their parameters; None for what is no function. Touches no driver."""
    saver = importlib.import_module("ebbtide.saver")
    signatures: dict[str, set[str] | None] = {}
    for name in [*dir(saver), *getattr(saver, "__all__", ())]:
        value = vars(saver).get(name)
        if not name.startswith("_") and not inspect.ismodule(value):
            signatures[name] = parameters_of(value) if callable(value) else None
    return signatures


def parameters_of(function: object) -> set[str] | None:
    """None where any keyword is taken, or where Python can't tell (classes made from built-in ones)."""
    try:
        parameters = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    except ValueError:
        return None
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return {parameter.name for parameter in parameters}


def command_options() -> dict[str, set[str]]:
    """Each command of `ebbtide` -> its options."""
    import click
    from ebbtide.cli import main

    context = click.Context(main)
    commands = {name: main.get_command(context, name) for name in main.list_commands(context)}
    return {
        name: {
            option
            for parameter in command.get_params(click.Context(command))
            for option in (*parameter.opts, *parameter.secondary_opts)
        }
        for name, command in commands.items()
        if command is not None
    }


@pytest.fixture(scope="module")
def known(root: Path) -> Known:
    headers = [*(root / "csrc/api").glob("ebbtide*.h"), root / "csrc/sim/control.h", root / "csrc/base/settings.def"]
    build_files = [root / "CMakeLists.txt", root / "tests/cpp/CMakeLists.txt", *(root / "cmake").glob("*.cmake")]
    settings = [root / "tests/conftest.py", root / "tools/build.mk"]
    ebbtide = importlib.import_module("ebbtide")
    package = {name for name in dir(ebbtide) if not name.startswith("_")}
    package |= {path.stem for path in (root / "python/ebbtide").iterdir()} | {"h", "map"}
    return Known(
        root=root,
        symbols=words_of([*headers, *build_files], r"\bebbtide_\w+") | {"ebbtide_sim_"},
        variables=words_of([*headers, *build_files, *settings], r"\bEBBTIDE_[A-Z][A-Z_0-9]*\b")
        | {"EBBTIDE_FUNCTION", "EBBTIDE_", "EBBTIDE_X"},
        make_targets=read_make_targets(root / "Makefile"),
        commands=command_options(),
        signatures=saver_signatures(),
        package=package,
    )


def test_every_name_in_the_docs_exists(root: Path, known: Known) -> None:
    pages = pages_of(root)
    assert [page.name for page in pages if not page.is_file()] == []
    faults = [fault for page in pages for fault in find_unknown_names(page, known)]
    assert not faults, "\n".join(faults)


def test_every_environment_variable_is_in_the_one_list(root: Path) -> None:
    listed = words_of([root / "csrc/base/settings.def"], r"\bEBBTIDE_[A-Z][A-Z_0-9]*\b")
    unlisted = {name: files for name, files in variables_read(root).items() if name not in listed}
    assert unlisted == {}, "list them in csrc/base/settings.def"
    in_core = {file for files in variables_read(root).values() for file in files if file.startswith("csrc/")}
    assert in_core == set(), "read them with base/settings.h"


def test_version_has_one_home(root: Path) -> None:
    """pyproject.toml's version is the package's, the core's, and the changelog's newest."""
    from importlib import metadata

    version = re.search(r'^version = "([\d.]+)"$', (root / "pyproject.toml").read_text(), re.MULTILINE)
    newest = re.search(r"^## (\d[\d.]+)", (root / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert version
    assert newest
    core = importlib.import_module("ebbtide._core")
    assert {metadata.version("ebbtide"), core.__version__, newest[1]} == {version[1]}


def test_build_requirements_agree(root: Path) -> None:
    """requirements/build.txt serves the build without isolation: the same pins as [build-system]."""
    isolated = re.search(r"^requires = \[(.*)\]$", (root / "pyproject.toml").read_text(), re.MULTILINE)
    assert isolated
    pins = set(re.findall(r'"([^"]+)"', isolated[1]))
    listed = set((root / "requirements/build.txt").read_text().split("\n"))
    assert pins <= listed


# What GitHub shows and the site does not: a fence with more than one word, a list right below a paragraph.
FENCE_WITH_WORDS = re.compile(r"^```\w+ .*$", re.MULTILINE)
LIST_IN_PARAGRAPH = re.compile(r"^(?![ \t]|[-*] |\d+\. |#|\||<).+\n(?:- |\d+\. ).*$", re.MULTILINE)


def broken_on_the_site(text: str) -> list[str]:
    prose = FENCE.sub("", text)
    return [*FENCE_WITH_WORDS.findall(text), *(match[0] for match in LIST_IN_PARAGRAPH.finditer(prose))]


def test_pages_look_alike_on_the_site_and_on_github(root: Path) -> None:
    broken = {page.name: found for page in pages_of(root) if (found := broken_on_the_site(page.read_text()))}
    assert broken == {}


# --- the checker, seen to fail ---


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("```text malloc\nx\n```\n", 1),
        ("It is used\n- here\n- there\n", 1),
        ("It is used\n\n- here\n  and so on\n- there\n\n```sh\nx\n- y\n```\n", 0),
    ],
)
def test_what_the_site_would_break_is_found(text: str, count: int) -> None:
    assert len(broken_on_the_site(text)) == count


@pytest.fixture
def small(tmp_path: Path) -> Known:
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "real.h").write_text("")
    return Known(
        root=tmp_path,
        symbols={"ebbtide_pause"},
        variables={"EBBTIDE_DRIVER"},
        make_targets={"test"},
        commands={"demo": {"--steps"}},
        signatures={"pause": {"tags", "backup"}, "device": None},
        package={"Error", "saver"},
    )


TRUE_PAGE = """
See [the header](csrc/real.h), `csrc/real.h`, `real.h`, `ebbtide_pause`, EBBTIDE_DRIVER, `make test`, `saver.device`,
`ebbtide.Error`, `/usr/lib/x.so`, `build/out/thing.txt` and `ebbtide demo --steps 3`.
```python
saver.pause("weights", backup=None)
```
"""


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[gone](csrc/gone.h)", "the link csrc/gone.h"),
        ("`csrc/gone.h`", "the path csrc/gone.h"),
        ("`gone/`", "the path gone/"),
        ("`gone.py`", "the path gone.py"),
        ("`ebbtide_paus`", "ebbtide_paus does not exist"),
        ("set EBBTIDE_DRIVR", "EBBTIDE_DRIVR does not exist"),
        ("`make tset`", "make tset"),
        ("`ebbtide dmeo`", "ebbtide dmeo"),
        ("`ebbtide demo --stops 3`", "no option --stops"),
        ("`saver.puase()`", "puase does not exist"),
        ("`ebbtide.Eror`", "Eror does not exist"),
        ("```python\nsaver.pause(backups=1)\n```", "no parameter backups"),
        ("```python\nsaver.pause(\n```", "does not parse"),
        ("```sh\nmake tset\n```", "make tset"),
        ("```sh\nebbtide dmeo\n```", "ebbtide dmeo"),
    ],
)
def test_a_planted_name_is_found(small: Known, text: str, complaint: str) -> None:
    page = small.root / "page.md"
    page.write_text(TRUE_PAGE)
    assert find_unknown_names(page, small) == []
    page.write_text(f"{TRUE_PAGE}\n{text}\n")
    faults = find_unknown_names(page, small)
    assert [complaint in fault for fault in faults] == [True], faults


def test_a_planted_variable_is_found(tmp_path: Path) -> None:
    for name, text in {
        "csrc/a.cpp": 'getenv("EBBTIDE_ONE")',
        "python/b.py": 'os.environ["EBBTIDE_TWO"]; os.environ.get(\n  "EBBTIDE_THREE")',
    }.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    assert sorted(variables_read(tmp_path)) == ["EBBTIDE_ONE", "EBBTIDE_THREE", "EBBTIDE_TWO"]


def test_the_api_page_has_every_public_name(root: Path) -> None:
    saver = importlib.import_module("ebbtide.saver")
    page = (root / "docs/api.md").read_text()
    values = {"device", "timeline"}  # said in the page's own words
    shown = re.findall(r"^<!-- reference: (\S+) -->$", page, re.MULTILINE)
    assert {name for name in shown if name.startswith("ebbtide.saver.")} == {
        f"ebbtide.saver.{name}" for name in set(saver.__all__) - values
    }
    lms = importlib.import_module("ebbtide.lms")
    assert {f"ebbtide.lms.{name}" for name in lms.__all__} | {"ebbtide.env", "ebbtide.preloaded"} <= set(shown)
    assert all(f"`saver.{name}`" in page for name in values)


def test_the_site_needs_no_build_of_ebbtide(root: Path) -> None:
    """Its pages come from the tree, and its tools import nothing of ebbtide."""
    assert re.search(r"^docs: \$\(DOC_TOOLS\) ##", (root / "Makefile").read_text(), re.MULTILINE)
    assert not re.search(r"^\s*(?:import|from) ebbtide", (root / "tools/docs_site.py").read_text(), re.MULTILINE)
    assert "mkdocs-click" not in (root / "mkdocs.yml").read_text() + (root / "requirements/docs.txt").read_text()
