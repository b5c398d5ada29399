"""The options of `ebbtide run`, `ebbtide.env` and `ebbtide.preloaded`: settings, and which of them belong together."""

import os
from collections.abc import Callable, Mapping

from ebbtide import settings
from ebbtide.settings import Setting
from ebbtide.sizes import format_size


def options() -> tuple[Setting, ...]:
    """The settings that are options. The command spells them --with-dashes."""
    return tuple(setting for setting in settings.all_settings() if setting.is_run_option)


# Options that do nothing unless another option has this value; "": any. torch_memory_saver's variable makes a program
# pauseable as well, and with pauseable_all the calls of a program's threads do.
_NEEDS = {
    "tag": ("pauseable", "1"),
    "backup": ("pauseable", "1"),
    "lms_min_size": ("lms", ""),
    "lms_recompute": ("lms", ""),
    "lms_overflow": ("lms", ""),
}
_TMS_VARIABLE, _TMS_YES = "TMS_INIT_ENABLE", ("1", "true", "TRUE", "yes", "YES")


def to_variables(
    given_options: Mapping[str, object], inherited: Mapping[str, str], spell: Callable[[str], str] = str
) -> dict[str, str]:
    """The variables of the options that are given; all others stay as they are inherited.

    Args:
        given_options: name -> value. None for `overflow` and `backup` is "none".
        inherited: the environment; the variables of settings in it must be well-formed too.
        spell: how an option is written in errors.

    Raises:
        TypeError: an option that does not exist, or a value of the wrong type.
        ValueError: a value that is malformed, more than the machine has, or without the option that it belongs to.
    """
    names = [option.name for option in options()]
    unknown = sorted(set(given_options) - set(names))
    if unknown:
        raise TypeError(f"there is no option {unknown[0]!r}; the options are {', '.join(names)}")
    given: dict[str, str] = {}
    in_force: dict[str, str] = {}
    for setting in settings.all_settings():
        if setting.name in given_options:
            given[setting.name] = settings.check(setting, given_options[setting.name], spell(setting.name))
            in_force[setting.name] = given[setting.name]
        elif text := settings.read(setting.name, inherited):
            in_force[setting.name] = text
    _check_needs(given, in_force, inherited.get(_TMS_VARIABLE) in _TMS_YES, spell)
    _check_host_sizes(given, in_force, spell)
    return {option.variable: given[option.name] for option in options() if option.name in given}


def _check_needs(
    given: Mapping[str, str], in_force: Mapping[str, str], is_tms_on: bool, spell: Callable[[str], str]
) -> None:
    for name, (other, value) in _NEEDS.items():
        if is_tms_on and other == "pauseable":
            continue
        if name in given and (in_force.get(other) != value if value else other not in in_force):
            needed = spell(other) if value in ("1", "") else f"{spell(other)} {value}"
            raise ValueError(f"{spell(name)} means nothing without {needed}: give both or neither")
    report = given.get("report", "device")
    if report != "device" and in_force.get("overflow") == "none":
        raise ValueError(
            f"{spell('report')} {report} promises host memory, not given by {spell('overflow')} none: leave one out"
        )
    if "lms" in in_force and in_force.get("pauseable") == "1":
        lms, pauseable = _names_of(("lms", "pauseable"), given, spell)
        raise ValueError(f"{lms} and {pauseable} each tag all of a program's memory: leave one out")


def _check_host_sizes(given: Mapping[str, str], in_force: Mapping[str, str], spell: Callable[[str], str]) -> None:
    ram_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in ("host_limit", "host_margin", "host_pool"):
        if name in given and int(given[name]) > ram_bytes:
            asked, there = format_size(int(given[name])), format_size(ram_bytes)
            raise ValueError(f"{spell(name)} is {asked}, and this machine has {there} of RAM: ask for less")
    if {"host_limit", "host_pool"} & set(given) and {"host_limit", "host_pool"} <= set(in_force):
        pool_bytes, limit_bytes = int(in_force["host_pool"]), int(in_force["host_limit"])
        if pool_bytes > limit_bytes:
            pool, limit = _names_of(("host_pool", "host_limit"), given, spell)
            raise ValueError(
                f"{pool} is {format_size(pool_bytes)}, and {limit} allows {format_size(limit_bytes)}: make the pool "
                "smaller"
            )


def _names_of(names: tuple[str, str], given: Mapping[str, str], spell: Callable[[str], str]) -> list[str]:
    """For errors: the options, or the variables of those that are not given."""
    return [spell(name) if name in given else settings.find(name).variable for name in names]
