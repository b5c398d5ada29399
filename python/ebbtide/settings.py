"""Every setting of ebbtide, as the core lists and checks them (csrc/base/settings.def).

`saver.configure`, the environment variables, the options of `ebbtide run`, `ebbtide doctor` and docs/settings.md come
from here. A value is turned into text and given to the core, which has the one rule for each kind.
"""

import difflib
import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ebbtide.errors import StoreError, neutral

_FORMS = {"size": "SIZE", "count": "NUMBER", "tag": "TAG", "folder": "PATH", "file": "PATH"}
_EXPECTED = {
    "folder": "a path of text",
    "file": "a path of text",
    "switch": "True or False",
    "size": 'a size like "16GiB" or an int of bytes',
    "count": "a whole number",
}
_BEYOND_ANY_SIZE = 2**64
_PREFIX = "EBBTIDE_"
_ALIKE = 0.8  # of difflib's ratio: one or two slips in a name


@dataclass(frozen=True)
class Setting:
    """One setting.

    Attributes:
        name: the keyword of `saver.configure` and `ebbtide.env`; `ebbtide run` spells it with dashes.
        kind: "size", "switch", "choice", "count", "tag", "folder" or "file".
        values: "split|whole" of a choice, "1|256" (least and most) of a count; "" for any.
        fallback: in force while nothing sets it: a value, or words where it depends on the machine.
        readers: some of "core preload python simulator".
        none: the meaning of None to `saver.configure`; "" where it is refused.
    """

    name: str
    variable: str
    kind: str
    values: str
    fallback: str
    readers: str
    meaning: str
    none: str
    is_configurable: bool
    is_run_option: bool

    @property
    def choices(self) -> tuple[str, ...]:
        return tuple(self.values.split("|")) if self.kind == "choice" else ()

    @property
    def form(self) -> str:
        """The form of its value in a command's help; "" for a switch."""
        return "|".join(self.choices) or _FORMS.get(self.kind, "")


@functools.cache
def all_settings() -> tuple[Setting, ...]:
    """All of them, in the order of the documentation."""
    return tuple(
        Setting(**{name: value for name, value in row.items() if name not in ("source", "problem")}) for row in _rows()
    )


def find(name: str) -> Setting:
    """The setting of this name; KeyError where there is none."""
    return next(setting for setting in all_settings() if setting.name == name)


def problems() -> dict[str, str]:
    """The problems of the variables of this process: maps the name of a setting to a sentence."""
    return {row["name"]: row["problem"] for row in _rows() if row["problem"]}


def misspelt(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that ebbtide does not read and that look like one of its own: maps each to that one."""
    known = {setting.variable.removeprefix(_PREFIX): setting.variable for setting in all_settings()}
    found = {}
    for name in sorted(name for name in environment if name.startswith(_PREFIX)):
        rest = name.removeprefix(_PREFIX)
        near = [] if rest in known else difflib.get_close_matches(rest, known, 1, _ALIKE)
        if near:
            found[name] = known[near[0]]
    return found


def check(setting: Setting, value: object, label: str, takes_text: bool = True) -> str:
    """The value in its plain form, which variables take as well: "1.5KiB" is "1536", True is "1".

    Args:
        label: how errors name it.
        takes_text: whether numbers and switches may be text, as in variables and options.

    Raises:
        TypeError: a value of the wrong type.
        ValueError: a malformed one.
        StoreError: disk_directory: no backup could be made there.
    """
    from ebbtide import _core

    text = as_text(setting, value, label, takes_text)
    return os.fsdecode(_core.check_setting(setting.name, _encode(setting, text), label))


def read(name: str, environment: Mapping[str, str]) -> str:
    """The value of a variable, in its plain form; "" where it is unset or empty.

    Raises:
        ValueError: it is malformed, or names a folder that can't be used.
    """
    setting = find(name)
    text = environment.get(setting.variable)
    try:
        return check(setting, text, setting.variable) if text else ""
    except StoreError as error:
        raise ValueError(neutral(error)) from None  # a variable was set outside of Python


def read_or_fallback(name: str, environment: Mapping[str, str]) -> str:
    """Like `read`, with the default where the variable is unset, empty or malformed: as the preload library reads
    it."""
    try:
        return read(name, environment) or find(name).fallback
    except ValueError:  # the library has said so
        return find(name).fallback


_environment_is_checked = False


def check_environment() -> None:
    """Checks the variables of this process at the first call. The core has read them by itself.

    Raises:
        ValueError: one of them is malformed, or names a folder that disk backups can't use.
    """
    global _environment_is_checked
    if _environment_is_checked:
        return
    for problem in problems().values():
        raise ValueError(problem)
    _environment_is_checked = True


def as_text(setting: Setting, value: object, label: str, takes_text: bool) -> str:
    """A value as it would be written; the core checks it. Raises TypeError, ValueError."""
    kind = setting.kind
    if value is None and "none" in setting.choices:  # as saver.region takes it
        return "none"
    if isinstance(value, str) and (takes_text or kind not in ("switch", "count")):
        return value
    if kind in ("folder", "file") and isinstance(value, os.PathLike) and isinstance(path := os.fspath(value), str):
        return path
    if kind == "switch" and isinstance(value, bool):
        return str(int(value))
    if kind in ("size", "count") and isinstance(value, int) and not isinstance(value, bool):
        # More digits may be an error of Python's, and a subclass may be shown in another way.
        return str(max(-_BEYOND_ANY_SIZE, min(int(value), _BEYOND_ANY_SIZE)))
    if kind == "tag":
        raise TypeError(f"a tag is a str, not {type(value).__name__}")
    expected = _EXPECTED.get(kind) or f"one of {', '.join(setting.choices)}"
    raise (ValueError if kind == "choice" else TypeError)(f"{label} must be {expected}, not {value!r}")


def _encode(setting: Setting, text: str) -> bytes:
    if setting.kind in ("folder", "file"):
        return os.fsencode(text)
    return text.encode("utf-8", "surrogatepass")  # a surrogate is no UTF-8, and refused as that


def _rows() -> list[dict[str, Any]]:
    from ebbtide import _core

    return _core.settings()
