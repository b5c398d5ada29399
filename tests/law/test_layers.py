"""The layer law of csrc/README.md, held over every include; no circles; the size of rooms and of files."""

import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCE_SUFFIXES = {".cpp", ".h", ".def", ".c", ".cu"}
MAX_LINES = 400
MAX_FILES = 15
TABLE_ROW = re.compile(r"^\| `(?P<layer>[a-z_/]+)/` \|(?P<what>[^|]*)\|(?P<allowed>[^|]*)\|$", re.MULTILINE)
INCLUDE = re.compile(r'^\s*#\s*include\s*(?:"(?P<own>[^"]+)"|<(?P<system>[^>]+)>)', re.MULTILINE)
# Headers that belong to one layer alone, by what they start with.
FOREIGN = {
    "pybind11/": {"bindings", "torch/cpu", "torch/lms"},
    "torch/": {"torch/cpu", "torch/lms"},
    "c10/": {"torch/cpu", "torch/lms"},
    "ATen/": {"torch/cpu", "torch/lms"},
    "Python.h": {"torch/lms"},
}
FREE_OF_CUDA = {"base", "kernels", "policy", "api", "bindings", "torch"}


def read_law(readme: str) -> dict[str, set[str]]:
    """Each layer and its allowed includes besides itself: folders end in "/", files do not."""
    return {row["layer"]: set(re.findall(r"`([^`]+)`", row["allowed"])) for row in TABLE_ROW.finditer(readme)}


def layer_of(path: str, layers: set[str]) -> str | None:
    """The layer that the longest matching folder names."""
    folder = str(Path(path).parent)
    return folder if folder in layers else None


def find_breaches(csrc: Path) -> list[str]:
    """Every include under csrc that the table of its README does not allow."""
    law = read_law((csrc / "README.md").read_text())
    breaches = []
    for path in sorted(p for p in csrc.rglob("*") if p.suffix in SOURCE_SUFFIXES):
        name = path.relative_to(csrc).as_posix()
        layer = layer_of(name, set(law))
        if layer is None:
            breaches.append(f"{name}: its folder has no row in csrc/README.md")
            continue
        for match in INCLUDE.finditer(path.read_text()):
            if match["own"]:
                breaches += check_own(name, layer, match["own"], law, csrc)
            else:
                breaches += check_system(name, layer, match["system"])
    return breaches


def check_own(name: str, layer: str, target: str, law: dict[str, set[str]], csrc: Path) -> list[str]:
    if layer == "api" and "/" not in target:
        target = f"api/{target}"  # the public headers name each other as they lie side by side where they are installed
    target_layer = layer_of(target, set(law))
    if target_layer is None or not (csrc / target).is_file():
        return [f'{name}: includes "{target}", which is no file under csrc/ (headers of others stand in <>)']
    if target_layer == layer or target in law[layer] or is_within(target_layer, law[layer]):
        return []
    return [f'{name}: includes "{target}", but {layer}/ may include only {" ".join(sorted(law[layer])) or "itself"}']


def is_within(layer: str, allowed: set[str]) -> bool:
    """A folder that is allowed stands for those below it, too: "core/" for every room of the core."""
    return any(f"{layer}/".startswith(name) for name in allowed if name.endswith("/"))


def find_circles(csrc: Path) -> list[str]:
    """A circle of units of the core (a header and its source) that include one another, if there is one."""
    included: dict[str, set[str]] = {}
    for path in sorted(p for p in (csrc / "core").rglob("*") if p.suffix in SOURCE_SUFFIXES):
        unit = path.relative_to(csrc).with_suffix("").as_posix()
        names = [match["own"] for match in INCLUDE.finditer(path.read_text()) if match["own"]]
        included.setdefault(unit, set()).update({Path(name).with_suffix("").as_posix() for name in names} - {unit})
    try:
        TopologicalSorter(included).prepare()
    except CycleError as error:
        return [" -> ".join(error.args[1])]
    return []


def find_crowded_rooms(csrc: Path) -> list[str]:
    """Rooms of the core with more files than one sees at a glance."""
    rooms = sorted(path for path in (csrc / "core").rglob("*") if path.is_dir())
    counts = {room.name: sum(path.is_file() for path in room.iterdir()) for room in rooms}
    return [f"core/{room}/: {count} files, at most {MAX_FILES}" for room, count in counts.items() if count > MAX_FILES]


def check_system(name: str, layer: str, target: str) -> list[str]:
    for prefix, layers in FOREIGN.items():
        if target.startswith(prefix) and layer not in layers:
            return [f"{name}: includes <{target}>, which {layer}/ may not know"]
    if target in ("cuda.h", "cuda_runtime.h", "cuda_runtime_api.h") and (layer in FREE_OF_CUDA or target != "cuda.h"):
        return [f"{name}: includes <{target}>, which {layer}/ may not know"]
    return []


def find_long_files(root: Path) -> list[str]:
    """Sources of 400 lines and more."""
    files = [
        path
        for folder in ("csrc", "python", "tests", "examples", "benchmarks", "cmake", "tools")
        for path in sorted((root / folder).rglob("*"))
        if path.suffix in {".cpp", ".h", ".c", ".py", ".pyi", ".cmake", ".sh", ".mk", ".def", ".cu"}
    ]
    return [
        f"{path.relative_to(root)}: {count} lines, the limit is {MAX_LINES - 1}"
        for path in files
        if (count := len(path.read_text().splitlines())) >= MAX_LINES
    ]


def test_every_include_keeps_the_layer_law(root: Path) -> None:
    breaches = find_breaches(root / "csrc")
    assert not breaches, "\n".join(breaches)


def test_every_layer_of_the_table_exists(root: Path) -> None:
    law = read_law((root / "csrc" / "README.md").read_text())
    assert [layer for layer in law if not (root / "csrc" / layer).is_dir()] == []
    for layer, allowed in law.items():
        assert [name for name in allowed if not (root / "csrc" / name).exists()] == [], layer


def test_core_layers_are_ordered(root: Path) -> None:
    """Lower never includes higher: the table itself must not allow a cycle."""
    law = read_law((root / "csrc" / "README.md").read_text())
    order = list(law)
    for layer, allowed in law.items():
        higher = [other for other in order[order.index(layer) :] if is_within(other, allowed)]
        assert higher == [], f"{layer}/ may include a layer that stands below it in the table"


def test_no_units_of_the_core_include_one_another(root: Path) -> None:
    assert find_circles(root / "csrc") == []


def test_rooms_of_the_core_are_small(root: Path) -> None:
    assert find_crowded_rooms(root / "csrc") == []
    assert [path.name for path in (root / "csrc" / "core").iterdir() if path.is_file()] == []


def test_files_are_short(root: Path) -> None:
    long_files = find_long_files(root)
    assert not long_files, "\n".join(long_files)


# --- the checks above, seen to fail ---

PLANTED_LAW = """
| layer | what it is | may include |
|---|---|---|
| `base/` | low | |
| `core/` | high | `base/` |
| `sim/` | alone | `base/names.def` |
"""


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """A law-abiding tree of three layers."""
    for name, text in {
        "README.md": PLANTED_LAW,
        "base/a.h": "#include <string>\n",
        "base/names.def": "",
        "core/b.cpp": '#include "base/a.h"\n#include <cuda.h>\n',
        "sim/c.cpp": '#include "base/names.def"\n',
    }.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert find_breaches(tmp_path) == []
    return tmp_path


@pytest.mark.parametrize(
    ("file", "text", "complaint"),
    [
        ("base/d.h", '#include "core/e.h"', "base/ may include only itself"),
        ("sim/d.cpp", '#include "base/a.h"', "sim/ may include only base/names.def"),
        ("core/d.cpp", '#include "a.h"', "no file under csrc"),
        ("core/d.cpp", "#include <torch/extension.h>", "core/ may not know"),
        ("core/d.cpp", "#  include <pybind11/pybind11.h>", "core/ may not know"),
        ("base/d.cpp", "#include <cuda.h>", "base/ may not know"),
        ("base/d.cu", '#include "core/e.h"', "base/ may include only itself"),
        ("core/d.cpp", "#include <cuda_runtime.h>", "core/ may not know"),
        ("extra/d.cpp", "", "no row in csrc/README.md"),
    ],
)
def test_a_planted_breach_is_found(planted: Path, file: str, text: str, complaint: str) -> None:
    (planted / "core" / "e.h").write_text("")
    (planted / file).parent.mkdir(exist_ok=True)
    (planted / file).write_text(text + "\n")
    assert [complaint in breach for breach in find_breaches(planted)] == [True]


def test_a_folder_stands_for_those_below_it(tmp_path: Path) -> None:
    law = "| `core/low/` | | |\n| `core/high/` | | `core/low/` |\n| `api/` | | `core/` |\n"
    for name, text in {
        "README.md": law,
        "core/low/a.h": "",
        "core/high/b.h": '#include "core/low/a.h"',
        "api/c.h": '#include "core/high/b.h"',
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert find_breaches(tmp_path) == []
    (tmp_path / "core" / "low" / "a.h").write_text('#include "core/high/b.h"\n')
    assert ["core/low/ may include only itself" in breach for breach in find_breaches(tmp_path)] == [True]


def test_a_planted_circle_is_found(planted: Path) -> None:
    assert find_circles(planted) == []
    (planted / "core" / "d.h").write_text('#include "core/e.h"\n')
    (planted / "core" / "e.cpp").write_text('#include "core/d.h"\n')
    assert ["core/d" in circle and "core/e" in circle for circle in find_circles(planted)] == [True]


def test_a_planted_crowd_is_found(tmp_path: Path) -> None:
    room = tmp_path / "core" / "room"
    room.mkdir(parents=True)
    for number in range(MAX_FILES):
        (room / f"{number}.h").touch()
    assert find_crowded_rooms(tmp_path) == []
    (room / "one_more.h").touch()
    assert len(find_crowded_rooms(tmp_path)) == 1


def test_a_planted_long_file_is_found(tmp_path: Path) -> None:
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "just_right.cpp").write_text("\n" * (MAX_LINES - 1))
    assert find_long_files(tmp_path) == []
    (tmp_path / "csrc" / "too_long.cpp").write_text("\n" * MAX_LINES)
    assert len(find_long_files(tmp_path)) == 1
