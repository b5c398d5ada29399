"""The options of `ebbtide run`, `ebbtide.env` and `ebbtide.preloaded`: one list of names, variables and checks.

What each of them means stands in settings.py, beside the other variables.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ebbtide.settings import SETTINGS
from ebbtide.sizes import format_size, parse_size


@dataclass(frozen=True)
class RunOption:
    """One option.

    Attributes:
        name: as a keyword; the command spells it --with-dashes.
        check: of a value and of the words for it in errors -> the variable's text. TypeError, ValueError.
        form: what is written for its value in a command's help; "" for a switch.
    """

    name: str
    variable: str
    check: Callable[[object, str], str]
    form: str

    @property
    def meaning(self) -> str:
        return next(setting.meaning for setting in SETTINGS if setting.name == self.variable)


def _check_size(value: object, label: str) -> str:
    if isinstance(value, str) or type(value) is int:
        return str(parse_size(value, label))
    raise TypeError(f'{label} must be a size like "16GiB" or an int of bytes, not {value!r}')


def _check_fraction(value: object, label: str) -> str:
    problem = f"{label} must be a number above 0 and at most 1, not {value!r}"
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise TypeError(problem)
    try:
        fraction = float(value)
    except ValueError:
        raise ValueError(problem) from None
    if not 0 < fraction <= 1:  # NaN as well
        raise ValueError(problem)
    return str(fraction)


def _check_switch(value: object, label: str) -> str:
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, str) and value.strip() in ("0", "1"):
        return value.strip()
    raise (ValueError if isinstance(value, str) else TypeError)(f"{label} must be 0 or 1, or a bool, not {value!r}")


def _check_tag(value: object, label: str) -> str:
    from ebbtide.saver.names import check_tag  # loads the core: only where there is a tag

    try:
        return check_tag(value)
    except ValueError as error:
        raise ValueError(f"{label}: {error}") from None


def _one_of(*choices: str) -> Callable[[object, str], str]:
    def check(value: object, label: str) -> str:
        word = "none" if value is None else value  # as saver.region takes it
        if isinstance(word, str) and word in choices:
            return word
        raise ValueError(f"{label} must be one of {', '.join(choices)}, not {value!r}")

    return check


def _choice(name: str, variable: str, *choices: str) -> RunOption:
    return RunOption(name, variable, _one_of(*choices), "|".join(choices))


OPTIONS: tuple[RunOption, ...] = (
    _choice("overflow", "EBBTIDE_OVERFLOW", "split", "managed", "whole", "none"),
    RunOption("device_limit", "EBBTIDE_DEVICE_LIMIT", _check_size, "SIZE"),
    RunOption("host_limit", "EBBTIDE_HOST_LIMIT", _check_size, "SIZE"),
    RunOption("host_margin", "EBBTIDE_HOST_MARGIN", _check_size, "SIZE"),
    RunOption("host_pool", "EBBTIDE_HOST_POOL", _check_size, "SIZE"),
    RunOption("reserve", "EBBTIDE_RESERVE", _check_size, "SIZE"),
    RunOption("whole_fraction", "EBBTIDE_WHOLE_FRACTION", _check_fraction, "FRACTION"),
    _choice("report", "EBBTIDE_REPORT", "device", "free", "total"),
    RunOption("pauseable", "EBBTIDE_PAUSEABLE", _check_switch, ""),
    RunOption("tag", "EBBTIDE_TAG", _check_tag, "TAG"),
    _choice("backup", "EBBTIDE_BACKUP", "ram", "pinned", "disk", "none"),
    RunOption("summary", "EBBTIDE_SUMMARY", _check_switch, ""),
    _choice("log", "EBBTIDE_LOG", "error", "warning", "info"),
)

# An option that does nothing unless another one has this value.
_NEEDS = {
    "tag": ("pauseable", "1"),
    "backup": ("pauseable", "1"),
    "whole_fraction": ("overflow", "whole"),
}


def as_keyword(name: str) -> str:
    return name


def to_variables(
    options: Mapping[str, object], inherited: Mapping[str, str], spell: Callable[[str], str] = as_keyword
) -> dict[str, str]:
    """The variables of the options that are given; for all others, what is inherited goes on.

    Args:
        options: name -> value. None for `overflow` and `backup` is "none".
        inherited: the environment; the variables in it that are options' must be well-formed too.
        spell: how an option is written in errors.

    Raises:
        TypeError: an option that does not exist, or a value of the wrong type.
        ValueError: a value that is malformed, more than the machine has, or without the option that it belongs to.
    """
    unknown = sorted(set(options) - {option.name for option in OPTIONS})
    if unknown:
        raise TypeError(f"there is no option {unknown[0]!r}; the options are {', '.join(o.name for o in OPTIONS)}")
    given: dict[str, str] = {}
    in_force: dict[str, str] = {}
    for option in OPTIONS:
        if option.name in options:
            given[option.name] = option.check(options[option.name], spell(option.name))
            in_force[option.name] = given[option.name]
        elif inherited.get(option.variable):
            in_force[option.name] = option.check(inherited[option.variable], option.variable)
    _check_needs(given, in_force, spell)
    _check_host_sizes(given, in_force, spell)
    return {option.variable: given[option.name] for option in OPTIONS if option.name in given}


def _check_needs(given: Mapping[str, str], in_force: Mapping[str, str], spell: Callable[[str], str]) -> None:
    for name, (other, value) in _NEEDS.items():
        if name in given and in_force.get(other) != value:
            needed = spell(other) if value == "1" else f"{spell(other)} {value}"
            raise ValueError(f"{spell(name)} means nothing without {needed}: give both or neither")
    report = given.get("report", "device")
    if report != "device" and in_force.get("overflow") == "none":
        raise ValueError(
            f"{spell('report')} {report} promises what nothing delivers with {spell('overflow')} none: leave one out"
        )


def _check_host_sizes(given: Mapping[str, str], in_force: Mapping[str, str], spell: Callable[[str], str]) -> None:
    ram_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in ("host_limit", "host_margin", "host_pool"):
        if name in given and int(given[name]) > ram_bytes:
            asked, there = format_size(int(given[name])), format_size(ram_bytes)
            raise ValueError(f"{spell(name)} is {asked}, and this machine has {there} of RAM: ask for less")
    if {"host_limit", "host_pool"} & set(given) and {"host_limit", "host_pool"} <= set(in_force):
        pool_bytes, limit_bytes = int(in_force["host_pool"]), int(in_force["host_limit"])
        if pool_bytes > limit_bytes:
            raise ValueError(
                f"{spell('host_pool')} is {format_size(pool_bytes)}, and {spell('host_limit')} allows "
                f"{format_size(limit_bytes)}: make the pool smaller"
            )
