"""Each private name of torch that ebbtide uses exists in the installed torch and accepts ebbtide's arguments.

A CUDA build answers this without a GPU. On a CPU build, the rows of CUDA are left out.
"""

import importlib
import inspect
import re
import sys

import pytest

torch = pytest.importorskip("torch")

from checks.torch_table import HEADERS, NAMES, POOL, Header, Name  # noqa: E402
from ebbtide.errors import StateError  # noqa: E402
from ebbtide.torch_extension.build import Recipe  # noqa: E402
from ebbtide.torch_support import torch_names, versions  # noqa: E402
from ebbtide.torch_support.torch_names import find  # noqa: E402

VERSION = versions.torch_version(torch.__version__)
IS_CUDA = torch.version.cuda is not None
ALL_VERSIONS = [(2, minor) for minor in range(versions.LEAST_TORCH[1], versions.NEWEST_TORCH[1] + 1)]
EXPECTED = [name for name in NAMES if name.is_expected(VERSION, IS_CUDA)]
FAKE_TENSOR = "torch._subclasses.fake_tensor"  # a module that `import torch` alone does not import
importlib.import_module("torch.utils._device")  # nor this one
INSTANCES = {
    "_subclasses.fake_tensor.FakeTensorMode": lambda: importlib.import_module(FAKE_TENSOR).FakeTensorMode(),
    "_ops.OpOverload": lambda: torch.ops.aten.add.Tensor,
    "UntypedStorage": lambda: torch.UntypedStorage(1),
    "nn.Module": torch.nn.Module,
    "Tensor": lambda: torch.empty(1),
}
PATTERNS = {
    "device": r"int\b|typing\.SupportsInt\b",
    "address": r"int\b|typing\.SupportsInt\b",
    "pool": r"[Tt]uple\[",
    "tensor": r"torch\.Tensor\b",
    "": r"",
}


def read_pybind_arguments(text, name):
    """The argument types of each overload, as pybind11 writes them into a function's docstring."""
    overloads = []
    for line in text.splitlines():
        match = re.match(rf"(?:\d+\. )?{name}\((.*)\) -> ", line)
        if match and not match[1].startswith("*args"):
            depth, parts, part = 0, [], ""
            for character in match[1]:
                depth += (character in "[(") - (character in "])")
                if character == "," and depth == 0:
                    parts.append(part)
                    part = ""
                else:
                    part += character
            parts += [part] if part.strip() else []
            overloads.append([one.partition(":")[2].strip() for one in parts if one.strip() != "/"])
    return overloads


def argument_fault(function, row, is_method):
    """Why the function does not accept what ebbtide passes; "" if it does."""
    overloads = read_pybind_arguments(function.__doc__ or "", row.path.rpartition(".")[2])
    if overloads:
        fits = any(
            len(types) == len(row.takes)
            and all(re.match(PATTERNS[kind], found) for kind, found in zip(row.takes, types, strict=True))
            for types in overloads
        )
        return "" if fits else f"{row.path} takes {overloads}, and is given {row.takes}"
    try:
        signature = inspect.signature(function)
    except ValueError:
        return count_fault(function, row, is_method)
    try:
        signature.bind(*[None] * (len(row.takes) + is_method), **dict.fromkeys(row.keywords))
    except TypeError as error:
        return f"{row.path}: {error}"
    return ""


def count_fault(function, row, is_method):
    """The same for a built-in without a signature, as most are before Python 3.13. Called with a wrong number of
    arguments, it names the right number in its error. That works for none and for one only."""
    instance = [torch.ones(1)] if is_method else []
    wrong, right = ([None], "takes no arguments") if not row.takes else ([], "takes exactly one argument")
    try:
        function(*instance, *wrong)
    except TypeError as error:
        fits = right in str(error) and len(row.takes) <= 1
        return "" if fits else f"{row.path}: {error}, and is given {row.takes}"
    return f"{row.path} takes another number of arguments than {len(row.takes)}"


def find_fault(row, root=torch):
    """Why this torch does not have what the row describes; "" if it does."""
    path, _, own = row.path.rpartition(".")
    if path.startswith("_subclasses."):
        importlib.import_module(FAKE_TENSOR)
    owner = root
    for part in path.split(".") if path else ():
        if not hasattr(owner, part):
            return f"torch has no {row.path}"
        owner = getattr(owner, part)
    if row.is_of_instances:
        return "" if hasattr(INSTANCES[path](), own) else f"objects of torch.{path} have no {own}"
    if not hasattr(owner, own):
        return f"torch has no {row.path}"
    if row.takes is None:
        return ""
    is_method = inspect.isclass(owner) and not isinstance(inspect.getattr_static(owner, own), staticmethod)
    return argument_fault(getattr(owner, own), row, is_method)


@pytest.mark.parametrize("row", EXPECTED, ids=lambda row: f"{row.path}({', '.join(row.takes or ())})")
def test_the_name_is_there_and_takes_what_it_is_given(row):
    assert find_fault(row) == ""


def test_a_cuda_build_is_asked_for_more():
    of_cuda = [name for name in EXPECTED if name.is_cuda_only]
    assert bool(of_cuda) == IS_CUDA
    assert len([name for name in EXPECTED if not name.is_cuda_only]) > 15


@pytest.mark.parametrize("version", ALL_VERSIONS, ids=versions.format_version)
def test_a_name_that_a_version_lacks_has_something_instead(version):
    """An alternative that is named with a path must be expected of that version."""
    there = {name.path for name in NAMES if name.is_expected(version, is_cuda=True)}
    for row in NAMES:
        if row.is_expected(version, is_cuda=True):
            continue
        assert row.instead, row.path
        named = [path for path in (row.instead.partition(",")[0],) if "." in path]
        assert set(named) <= there, f"{row.path} in {version}"
    assert ("_C._cuda_endAllocateToPool" in there) != ("_C._cuda_endAllocateCurrentStreamToPool" in there)


def squeeze(text):
    return re.sub(r"\s+", " ", text)


def header_faults(folder, header):
    text = squeeze((folder / header.path).read_text())
    return [wanted for wanted in header.texts if squeeze(wanted) not in text]


@pytest.mark.parametrize("header", HEADERS, ids=lambda header: header.path)
def test_the_headers_have_what_the_extension_uses(header):
    assert header_faults(Recipe.of_this_process().torch_folder / "include", header) == []


def test_every_function_that_takes_a_pool_is_known():
    assert [f"_C.{name}" for name in torch_names.POOL_FUNCTIONS] == [row.path for row in NAMES if row.takes == POOL]


# --- the effect of a missing name ---


def test_the_first_name_that_there_is_counts(monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", "new", raising=False)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateCurrentStreamToPool", "old", raising=False)
    assert torch_names.end_allocate() == "new"
    monkeypatch.delattr(torch._C, "_cuda_endAllocateToPool")
    assert torch_names.end_allocate() == "old"


def test_a_name_that_is_gone_is_a_sentence(monkeypatch):
    monkeypatch.delattr(torch._C, "_cuda_releasePool", raising=False)
    with pytest.raises(StateError, match=r"has no torch\._C\._cuda_releasePool, which ebbtide needs: use a torch"):
        find("_C._cuda_releasePool")


# --- the checker finds planted faults ---


class Planted:
    """A torch whose names do not fit."""

    class _C:
        @staticmethod
        def no_arguments():
            pass

        @staticmethod
        def of_pybind():
            "of_pybind(arg0: int, arg1: tuple[int, int]) -> None\n"

        @staticmethod
        def of_new_pybind():
            "of_new_pybind(arg0: typing.SupportsInt | typing.SupportsIndex, arg1: tuple[a, b], /) -> None\n"

        @staticmethod
        def overloaded():
            "overloaded(*args, **kwargs)\n1. overloaded(arg0: int) -> None\n2. overloaded(arg0: torch.Tensor) -> int\n"


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        (Name("_C.gone", ""), "no _C.gone"),
        (Name("nowhere.at.all", ""), "no nowhere.at.all"),
        (Name("_C.no_arguments", "", ("",)), "too many positional"),
        (Name("_C.no_arguments", "", (), ("pool",)), "unexpected keyword"),
        (Name("_C.no_arguments", "", ()), ""),
        (Name("_C.of_pybind", "", ("device", "pool")), ""),
        (Name("_C.of_pybind", "", ("pool", "device")), "and is given"),
        (Name("_C.of_pybind", "", ("device",)), "and is given"),
        (Name("_C.of_new_pybind", "", ("device", "pool")), ""),
        (Name("_C.of_new_pybind", "", ("tensor", "pool")), "and is given"),
        (Name("_C.overloaded", "", ("tensor",)), ""),
        (Name("_C.overloaded", "", ("pool",)), "and is given"),
    ],
)
def test_a_planted_fault_is_found(row, fault):
    found = find_fault(row, Planted)
    assert fault in found and bool(found) == bool(fault), found


@pytest.mark.parametrize(
    ("function", "takes", "fault"),
    [
        (len, ("",), ""),
        (len, (), "has no len()"),
        (len, ("", ""), "exactly one argument (0 given), and is given"),
        (sys.getswitchinterval, (), ""),
        (sys.getswitchinterval, ("",), "another number of arguments than 1"),
    ],
)
def test_a_count_of_arguments_that_does_not_fit_is_found(function, takes, fault):
    found = count_fault(function, Name(function.__name__, "", takes), is_method=False)
    assert fault in found and bool(found) == bool(fault), found


def test_an_attribute_of_objects_that_is_gone_is_found():
    assert "have no" in find_fault(Name("UntypedStorage._gone", "", is_of_instances=True))


def test_a_header_that_changed_is_found(tmp_path):
    (tmp_path / "a.h").write_text("void\n  f(int x);")
    assert header_faults(tmp_path, Header("a.h", ("void f(int x);", "void f(int x, int y);"))) == [
        "void f(int x, int y);"
    ]
