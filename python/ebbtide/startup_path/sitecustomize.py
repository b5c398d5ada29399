"""Run by each Python under `ebbtide run --lms`: waits for torch, then turns large model support on.

This folder is the first entry of PYTHONPATH, so Python imports this module in place of the user's own `sitecustomize`.
It takes itself and its entry away and imports the user's. Afterwards all is as without ebbtide, but for one finder that
goes when torch has been imported. ebbtide is imported after torch: most Pythons that a program starts need neither, and
pay for this file alone.
"""

import os
import sys

TYPE_CHECKING = False  # `typing` would be the largest import here
if TYPE_CHECKING:
    from typing import Any


class _TorchFinder:
    """Finds torch as the other finders do, and enables LMS at the end of its import."""

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "Any":
        if name != "torch":
            return None
        finders = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in finders)), None)
        if spec is not None and spec.loader is not None:
            self._follow(spec.loader)
        return spec

    def _follow(self, loader: "Any") -> None:
        """Replaces a method of the loader, which serves this one module, until it is called."""

        def exec_module(module: "Any") -> None:
            del loader.exec_module
            loader.exec_module(module)
            _enable()
            # A new list: another thread may be walking over this one.
            sys.meta_path = [finder for finder in sys.meta_path if finder is not self]

        # Python leaves importlib's frames out of tracebacks, and knows them by this name.
        exec_module.__code__ = exec_module.__code__.replace(co_filename="<frozen importlib._bootstrap>")
        loader.exec_module = exec_module


def _enable() -> None:
    try:
        from ebbtide.lms.program import enable_in_program
    except ImportError as error:
        try:  # as `say`, for a package that is not there
            if sys.stderr is not None:
                text = f"ebbtide: no large model support for {sys.executable}, so it ends: {error}"
                print(text, file=sys.stderr, flush=True)
        finally:
            raise SystemExit(1) from None
    enable_in_program()


def _step_aside() -> None:
    folder = __file__.rpartition("/")[0]
    sys.path[:] = [entry for entry in sys.path if entry != folder]
    del sys.modules[__name__]


if os.environ.get("EBBTIDE_LMS"):
    sys.meta_path.insert(0, _TorchFinder())
_step_aside()
__import__("sitecustomize")  # the user's; where there is none, Python takes the error as that
