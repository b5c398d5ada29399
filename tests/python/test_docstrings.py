"""help() begins with the text for users, and the examples in docstrings are right."""

import ast
import inspect
import os
import pydoc
import re
import subprocess
import textwrap
import types
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import ebbtide  # noqa: E402
from ebbtide import saver as the_saver  # noqa: E402

SURFACES = {"ebbtide": ebbtide, "ebbtide.saver": the_saver, "ebbtide.lms": ebbtide.lms}
# They need a GPU, on which tests/gpu captures graphs, or another process, or steps of training.
ONLY_COMPILED = {
    *("ebbtide.saver.cuda_graph", "ebbtide.saver.graph_pool", "ebbtide.saver.hand_over"),
    *("ebbtide.lms.plot", "ebbtide.lms.save_plan"),
}


def public_callables():
    """Not by getattr: to ask for `saver.device` or `saver.timeline` starts the driver, which is not this module's to do
    while others are collected."""
    for where, module in SURFACES.items():
        for name in module.__all__:
            thing = vars(module).get(name)
            if callable(thing) and not isinstance(thing, types.ModuleType):
                yield f"{where}.{name}", thing


PUBLIC = dict(public_callables())
# Read, not imported: most import the framework that they are for.
INTEGRATIONS = Path(ebbtide.__file__).parent / "integrations"
SHARED_BY_INTEGRATIONS = {"__init__", "resting", "vllm_allocator"}


def docstrings_of_integrations():
    for path in sorted(INTEGRATIONS.glob("*.py")):
        if path.stem in SHARED_BY_INTEGRATIONS:
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                yield f"{path.stem}.{node.name}", ast.get_docstring(node)


INTEGRATION_DOCSTRINGS = dict(docstrings_of_integrations())


def examples_in(docstring):
    """The indented blocks of a docstring before its sections."""
    text = re.split(r"^(?:Args|Returns|Raises|Attributes|Yields):$", docstring or "", flags=re.M)[0]
    blocks = re.findall(r"(?:^|\n)\n((?:    .*\n|\n)+)", text + "\n")
    return [textwrap.dedent(block) for block in blocks if block.strip()]


@pytest.fixture
def names(saver):
    """The names in the examples: some memory in each of two tags."""
    with saver.region("weights"):
        model = torch.nn.Linear(512, 512).to(saver.device)
    with saver.region("kv_cache", backup=None):
        cache = torch.zeros(1 << 20, device=saver.device)
    found = {
        "ebbtide": ebbtide,
        "saver": saver,
        "torch": torch,
        "subprocess": subprocess,
        "os": os,
        "command": ["true"],
        "model": model,
        "cache": cache,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "train": lambda: None,
    }
    yield found
    found.get("remove", lambda: None)()  # the hook of the example of `saver.on`
    ebbtide.lms.disable()
    saver.configure(skip_constant=True, host_margin=0, progress=None)  # a callback would keep the memory above
    saver.resume("weights", "kv_cache")


@pytest.mark.usefixtures("quick_scans")
@pytest.mark.parametrize("name", PUBLIC)
def test_each_has_an_example_that_runs(name, names):
    blocks = examples_in(inspect.getdoc(PUBLIC[name]))
    assert blocks, f"{name} has no example in its docstring"
    if "swap(" in "".join(blocks):
        names["saver"].pause("kv_cache")
    for block in blocks:
        code = compile(block, name, "exec")
        if name not in ONLY_COMPILED:
            exec(code, names)


@pytest.mark.parametrize("name", INTEGRATION_DOCSTRINGS)
def test_each_integration_has_an_example(name):
    blocks = examples_in(INTEGRATION_DOCSTRINGS[name])
    assert blocks, f"{name} has no example in its docstring"
    for block in blocks:
        assert name.split(".")[1] in block
        compile(block, name, "exec")


@pytest.mark.parametrize("what", ["fsdp_model", "fsdp_optimizer"])
def test_the_examples_for_verl_run(what, names):
    from ebbtide.integrations import verl

    names["model"](torch.ones(1, 512, device=names["saver"].device)).sum().backward()
    names["optimizer"] = torch.optim.AdamW(names["model"].parameters())
    names["optimizer"].step()
    for function in (f"offload_{what}", f"load_{what}"):
        [name] = [name for name in INTEGRATION_DOCSTRINGS if name.startswith(f"verl.{function}")]
        for block in examples_in(INTEGRATION_DOCSTRINGS[name]):
            exec(compile(block, name, "exec"), {**vars(verl), **names})


def test_help_lists_every_function_first(saver):
    text = pydoc.plain(pydoc.render_doc(the_saver))
    summary = text[: text.index("PACKAGE CONTENTS")]
    functions = [name for name in the_saver.__all__ if inspect.isroutine(getattr(the_saver, name))]
    assert len(functions) > 15
    listed = re.findall(r"^ {8}(\w+)(?:\(| )", summary, flags=re.M)
    for name in (*functions, "timeline", "device"):
        assert listed.count(name) == 1, f"help(saver) names {name} {listed.count(name)} times"
    assert [name for name in listed if name not in the_saver.__all__ and name not in ("from", "with", "saver")] == []
