"""`ebbtide.preloaded`: a `with` inside which this process's children start with the preload library."""

import os
from typing import Any

from ebbtide.launch import ledger, preloading
from ebbtide.scopes import DecoratingScope


class Preloaded(DecoratingScope):
    """The context manager that `preloaded` returns."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._before: dict[str, str | None] = {}

    def _again(self) -> "Preloaded":
        return Preloaded(self._options)

    def _open(self) -> dict[str, str]:
        added = preloading.env(**self._options)
        self._before = {name: os.environ.get(name) for name in (*added, preloading.UNIFIED_MEMORY_VARIABLE)}
        preloading.drop_unified_memory(os.environ)
        os.environ.update(added)
        return added

    def _close(self) -> None:
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        if self._before:
            ledger.sweep()


def preloaded(**options: Any) -> Preloaded:
    """Gives this process the environment of `env(**options)`, so that its children start with the preload library.

        with ebbtide.preloaded(overflow="split"):
            subprocess.run(["true"], check=True)

    Afterwards the environment is as before. It belongs to the whole process: children that other threads start
    meanwhile get it as well. This process itself is not preloaded by it. Options and errors are those of `env`.
    """
    return Preloaded(options)
