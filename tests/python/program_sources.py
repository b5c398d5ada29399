"""Imports modules of a program from its own sources, without the program's dependencies.

    serve("sglang", path, real=["sglang.srt.constants"])

`path` is a wheel or a checkout. The modules named in `real` are its own files, unmodified. Every other module of the
program, and every module that these import and that is not installed, is made up: whatever is asked of it is there, is
false, does nothing, and as a decorator or a base class changes nothing. So a file of a program runs as far as its own
lines say.
"""

import importlib.abc
import importlib.util
import sys
from collections.abc import Iterable, Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any


class _Base:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __init_subclass__(cls, **_: Any) -> None: ...


class Anything:
    """The value of every name in a made-up module."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        is_decorator = len(arguments) == 1 and not options and callable(arguments[0])
        return arguments[0] if is_decorator and arguments[0].__name__ != "<lambda>" else Anything()

    __name__ = "anything"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __mro_entries__(self, _: Any) -> tuple[type, ...]:
        return (_Base,)

    def __bool__(self) -> bool:
        return False

    def __iter__(self) -> Any:
        return iter(())

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: Any) -> None: ...

    def _itself(self, *_: Any) -> Any:
        return self

    def _no(self, _: Any) -> bool:
        return False

    __getitem__ = __or__ = __ror__ = _itself
    __lt__ = __gt__ = __le__ = __ge__ = _no


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Comes first for the program itself, and last for modules that no other finder has."""

    def __init__(self, program: str, root: Path, real: set[str], given: Mapping[str, Mapping[str, Any]]) -> None:
        self._program, self._root, self._real, self._given = program, root, real, given
        self._is_last = False

    def last(self) -> "_Finder":
        other = _Finder(self._program, self._root, self._real, self._given)
        other._is_last = True
        return other

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        is_own = name.partition(".")[0] == self._program or name in self._given
        if not is_own and not (self._is_last and _importer().partition(".")[0] == self._program):
            return None
        if name in self._real:
            place = self._root.joinpath(*name.split("."))
            package = place / "__init__.py"
            file = package if package.is_file() else place.with_suffix(".py")
            folders = [str(place)] if file is package else None
            return importlib.util.spec_from_file_location(name, file, submodule_search_locations=folders)
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__.update(self._given.get(module.__name__, {}))


def _importer() -> str:
    """The module whose line imports: what other packages would like to have, and do without, is not made up."""
    frame = sys._getframe(1)
    while frame.f_back is not None and ("importlib" in frame.f_code.co_filename or frame.f_globals is globals()):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__"))


def serve(program: str, source: str, real: Iterable[str], given: Mapping[str, Mapping[str, Any]] | None = None) -> None:
    """From now on imports of this program are served from `source`, and missing modules are made up.

    Args:
        given: what modules that are made up have, by their name.
    """
    finder = _Finder(program, Path(source), set(real), given or {})
    sys.meta_path.insert(0, finder)
    sys.meta_path.append(finder.last())
