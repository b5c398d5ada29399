"""Pages that repeat facts of the code must agree with it."""

import inspect
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from ebbtide import errors
from ebbtide.cli import main

CONTEXT_SWITCHES = {"cuCtxGetCurrent", "cuCtxSetCurrent"}

DRIVER_CALLS = """
import ctypes
from pathlib import Path
import torch
from ebbtide import _core, saver

saver.device
simulator = ctypes.CDLL(str(Path(_core.loaded_library()).with_name("libebbtide_sim.so")))
simulator.ebbtide_sim_log.restype = ctypes.c_size_t

def show(step):
    size = simulator.ebbtide_sim_log(None, 0) + 1
    text = ctypes.create_string_buffer(size)
    simulator.ebbtide_sim_log(text, size)
    simulator.ebbtide_sim_clear_log()
    for line in text.value.decode().splitlines():
        print(step, line.split("(")[0])

with saver.region("other"):
    torch.ones(1)
simulator.ebbtide_sim_clear_log()
with saver.region("weights"):
    show("enter")
    tensor = torch.randint(0, 256, (12 << 20,), dtype=torch.uint8, device=saver.device)
    show("malloc")
show("leave")
saver.pause("weights")
show("pause")
saver.resume("weights")
show("resume")
"""


def calls_of(text: str) -> list[str]:
    """The calls in a text with one call a line, or "16 x cuEventCreate"."""
    lines = re.findall(r"^(?:(\d+) x )?(\w+)$", text, re.M)
    assert len(lines) == len(text.splitlines())
    return [call for count, call in lines for _ in range(int(count or 1))]


@pytest.mark.sim_only
def test_the_readme_of_csrc_lists_the_driver_calls_of_a_run(root: Path, run_python) -> None:
    page = (root / "csrc/README.md").read_text()
    blocks = re.findall(r"^Driver calls of the (\w+):\n\n```text\n(.*?)^```", page, re.M | re.S)
    listed = {step: calls_of(text) for step, text in blocks}
    result = run_python(DRIVER_CALLS, EBBTIDE_COPY_THREADS="1", EBBTIDE_DRIVER="sim")
    assert result.returncode == 0, result.stderr
    made: dict[str, list[str]] = {}
    for line in result.stdout.splitlines():
        step, call = line.split()
        if call not in CONTEXT_SWITCHES:
            made.setdefault(step, []).append(call)
    assert made == listed


def test_settings_page_is_the_list(root: Path) -> None:
    page = (root / "docs/settings.md").read_text()
    tool = runpy.run_path(str(root / "tools/make_settings_page.py"))
    assert page == tool["write_tables"](page), "run tools/make_settings_page.py"


REFERENCES = ("docs/api.md", "docs/c_api.md", "docs/cli/reference.md")


@pytest.mark.parametrize("page", REFERENCES)
def test_reference_is_that_of_the_sources(root: Path, page: str) -> None:
    tool = runpy.run_path(str(root / "tools/make_reference.py"))
    text = (root / page).read_text()
    assert text == tool["write_reference"](text), "run tools/make_reference.py"
    assert tool["PAGES"] == REFERENCES


def test_the_reference_has_no_internals_and_follows_the_source(root: Path) -> None:
    tool = runpy.run_path(str(root / "tools/make_reference.py"))
    page = (root / "docs/api.md").read_text()
    headings = set(re.findall(r"^#### (\S+)$", page, re.MULTILINE))
    assert {"Pending.wait", "TagStatus.device_bytes"} <= headings
    assert not any(heading.partition(".")[2] in tool["_INTERNAL"] for heading in headings)
    planted = page.replace("Tags torch's allocations inside", "Tags nothing")
    assert planted != page and tool["write_reference"](planted) == page


def test_errors_page_names_every_class(root: Path) -> None:
    page = (root / "docs/errors.md").read_text()
    public = {
        name: thing
        for name, thing in vars(errors).items()
        if inspect.isclass(thing) and issubclass(thing, errors.Error) and not name.startswith("_")
    }
    assert len(public) >= 5
    for name, thing in public.items():
        assert f"`ebbtide.{name}`" in page
        assert f"\n## {name}\n" in page or thing is errors.Error
        assert all(f"`{field}`" in page for field in thing._fields)


def test_readme_shows_the_first_example_as_it_is(root: Path) -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```", (root / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert block == (root / "examples/01_pause_resume.py").read_text()


def test_readme_lists_every_command(root: Path) -> None:
    section = (root / "README.md").read_text().split("\n## Commands\n")[1].split("\n## ")[0]
    assert set(re.findall(r"^ebbtide (\w+)", section, re.MULTILINE)) == set(main.commands)


@pytest.fixture
def c_page(root: Path) -> dict[str, str]:
    """The program and the commands of docs/c_api.md."""
    page = (root / "docs/c_api.md").read_text()
    program, *_ = re.findall(r"^```c\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (commands,) = re.findall(r"^```sh\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    return {"program": program, "commands": commands}


def test_c_page_shows_the_example_as_it_is(root: Path, c_page: dict[str, str]) -> None:
    assert c_page["program"] == (root / "examples/11_from_c.c").read_text()


def test_the_commands_of_the_c_page_build_and_run_it(root: Path, c_page: dict[str, str], tmp_path: Path) -> None:
    """Runs the commands of the page, with warnings as errors, against the installed package."""
    commands = c_page["commands"].replace("$(ebbtide ", f"$({shlex.quote(sys.executable)} -m ebbtide.cli ")
    commands = commands.replace("cc -std=c11", "cc -std=c11 -Wall -Wextra -Werror -pedantic")
    commands = commands.replace("examples/", f"{root}/examples/")
    done = subprocess.run(
        ["bash", "-eu", "-c", commands], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    size = 64 << 20
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"{size} bytes on the device at 0x")
    assert lines[1:] == [f"paused: freed {size} bytes, 0 are left", f"resumed: {size} bytes at the same address"]


@pytest.fixture
def rl_blocks(root: Path) -> list[str]:
    """The programs of the first section of docs/walkthrough.md."""
    section = (root / "docs/walkthrough.md").read_text().split("\n## ")[1]
    return re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)


AFTER_THE_LOOP = """
assert saver.tags()["trainer"].stored_bytes > 48 << 20, "weights and AdamW's states"
for tag in ("trainer", "generator"):
    why = saver.explain(tag)
    assert why.clean == 0 and why.copied + why.changed >= 16 << 20, "each pause copies both tags whole"
saver.resume("trainer")
assert all(map(torch.equal, generator.parameters(), trainer.parameters()))
"""
PAUSES = "error:the pause of"


def test_the_loop_of_the_walkthrough_keeps_adamw_in_its_tag(rl_blocks, run_python) -> None:
    done = run_python(rl_blocks[0] + AFTER_THE_LOOP, trains=True, EBBTIDE_CHECK="1", PYTHONWARNINGS=PAUSES)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == re.findall(r"# (all .* lie in tags)$", rl_blocks[0], re.M) * 3


def test_the_loop_of_the_walkthrough_would_leave_adamw_behind(rl_blocks, run_python) -> None:
    """The planted fault: the step is made outside of the region."""
    wrong = rl_blocks[0].replace("    with trainer_memory:\n        optimizer", "    if True:\n        optimizer")
    assert wrong != rl_blocks[0]
    done = run_python(wrong, trains=True, EBBTIDE_CHECK="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("32.0 MiB of 48.0 MiB lie in no tag: 32.0 MiB of optimizer states\n")
    assert done.stderr.count("the pause of 'trainer' leaves 32.0 MiB of optimizer states on the device") == 1


TRAINING = """
import torch
from ebbtide import saver

def train_one_step(trainer, optimizer):
    trainer(torch.ones(4, 512, device=saver.device)).sum().backward()
    optimizer.step()

with saver.region("trainer"):
    trainer = torch.nn.Linear(512, 512).to(saver.device)
optimizer = torch.optim.AdamW(trainer.parameters())
"""


def test_the_walkthrough_adopts_what_the_first_step_made(rl_blocks, run_python) -> None:
    done = run_python(TRAINING + rl_blocks[1], trains=True)
    assert (done.returncode, done.stdout) == (0, "all 4.0 MiB lie in tag trainer\n"), done.stderr


# Each name in a process of its own, which has imported ebbtide and nothing more of it.
TYPED = """
import os, sys
import ebbtide
assert not {"torch", "ebbtide.saver", "ebbtide._core"} & set(sys.modules)
for name in NAMES:
    pid = os.fork()
    if pid == 0:
        try:
            eval(name)
        except ModuleNotFoundError as error:
            is_optional = any(word in name for word in ("transformers", "lightning", "vllm"))
            assert is_optional and not error.name.startswith("ebbtide"), error
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0, name
"""
DOTTED = re.compile(r"`(ebbtide(?:\.\w+){2,})\b")


def test_what_pages_type_after_ebbtide_is_there_after_import_ebbtide(root: Path, run_python) -> None:
    pages = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    typed = sorted({name for page in pages for name in DOTTED.findall(page.read_text())})
    assert len([name for name in typed if name.startswith(("ebbtide.compat.", "ebbtide.integrations."))]) > 5
    result = run_python(TYPED.replace("NAMES", repr(typed)))
    assert result.returncode == 0, result.stdout + result.stderr
