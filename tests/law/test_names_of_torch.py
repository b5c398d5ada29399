"""Every private name of torch in the sources has a row in checks/torch_table.py, and every row is used."""

from pathlib import Path

import pytest
from checks.torch_names import names_defined, names_looked_up, private_names
from checks.torch_table import HEADERS, NAMES

NOT_OF_TORCH = {"_failure", "_is_owned", "_at_fork_reinit"}  # of `_core.Scope`, and of Python's locks


def used_names(root: Path) -> dict[str, set[str]]:
    """Each private name in the package -> the files that use it."""
    package = root / "python/ebbtide"
    texts = {path.relative_to(package).as_posix(): path.read_text() for path in sorted(package.rglob("*.py"))}
    own = {name for text in texts.values() for name in names_defined(text)} | NOT_OF_TORCH
    used: dict[str, set[str]] = {}
    for file, text in texts.items():
        for name in private_names(text, own) | names_looked_up(text):
            used.setdefault(name, set()).add(file)
    return used


def test_every_private_name_has_a_row(root: Path) -> None:
    last_parts = {name.path.rpartition(".")[2] for name in NAMES}
    without = {name: files for name, files in used_names(root).items() if name.rpartition(".")[2] not in last_parts}
    assert without == {}, "list them in tests/checks/torch_table.py"


def test_every_row_is_used(root: Path) -> None:
    texts = [path.read_text() for path in (root / "python/ebbtide").rglob("*.py")]
    idle = [name.path for name in NAMES if not any(name.path.rpartition(".")[2] in text for text in texts)]
    assert idle == []


def test_every_header_is_included(root: Path) -> None:
    sources = "".join(path.read_text() for path in (root / "csrc/torch/cpu").iterdir())
    included = {line.split("<")[1].rstrip(">") for line in sources.splitlines() if line.startswith("#include <c10/")}
    assert {header.path for header in HEADERS} <= included
    # Macros alone, which the build itself would miss.
    assert included - {header.path for header in HEADERS} <= {"c10/util/Exception.h"}


# --- the finder, seen to find ---


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import torch\ntorch._C._planted(1)", {"_C._planted"}),
        ("import torch\ntorch._foreach_planted_([])", {"_foreach_planted_"}),
        ("from torch._C import _planted as other", {"_C._planted"}),
        ("from torch.utils._python_dispatch import Planted", {"utils._python_dispatch.Planted"}),
        ("def f(tensor):\n    return tensor._planted()", {"_planted"}),
        ('def f(mode):\n    return getattr(mode, "_planted", None)', {"_planted"}),
        ("bindings = torch._C\nbindings._planted()", {"_planted"}),
        ("def f(self):\n    self._own()\n    type(self)._own\n    ours._own", set()),
        ("from ebbtide import _core\n_core.thing()\nos._exit(0)", set()),
        ("import torch\ntorch.cuda.synchronize()", set()),
    ],
)
def test_a_planted_name_is_found(text: str, found: set[str]) -> None:
    assert private_names(text, {"_own", "_core"}) == found


def test_what_a_file_defines() -> None:
    text = "class _A:\n    _b: int\n    def _c(self):\n        self._d = _e = 1"
    assert set(names_defined(text)) == {"_A", "_b", "_c", "_d", "_e"}


def test_a_looked_up_name_is_found() -> None:
    assert names_looked_up('find("_C._one", "_C._two")\ntorch_names.find("cuda.three")\nother.find(".")') == {
        "_C._one",
        "_C._two",
        "cuda.three",
    }
