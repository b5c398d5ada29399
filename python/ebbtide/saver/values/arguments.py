"""The arguments that callers write for tags, backups and overflow, checked and turned into core codes."""

from collections.abc import Iterable, Iterator, KeysView, Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import Final, Literal, NamedTuple, TypeAlias

from ebbtide import _core

BackupName: TypeAlias = Literal["ram", "pinned", "disk"]

OverflowName: TypeAlias = Literal["split", "whole"]

# The codes of ebbtide_backup_kind.
_BACKUP_CODES: dict[str | None, int] = {None: 0, "ram": 1, "pinned": 2, "disk": 3}
NO_BACKUP_CODE: Final = 0
# The codes of ebbtide_overflow.
_OVERFLOW_CODES: dict[str | None, int] = {None: 0, "split": 1, "whole": 2}
NO_OVERFLOW_CODE: Final = 0
AS_ALLOCATED_CODE: Final = -1


class _AsAllocated(Enum):
    """The type of AS_ALLOCATED: each allocation's own policy decides."""

    AS_ALLOCATED = "as each allocation's region said"

    def __repr__(self) -> str:
        return "AS_ALLOCATED"


AS_ALLOCATED: Final = _AsAllocated.AS_ALLOCATED
OperationBackup: TypeAlias = BackupName | Literal[_AsAllocated.AS_ALLOCATED] | None
BackupByTag: TypeAlias = Mapping[str, OperationBackup]
# Not Iterable: a dict is one, and has a meaning of its own.
Tags: TypeAlias = str | list[str] | tuple[str, ...] | set[str] | frozenset[str] | KeysView[str] | Iterator[str]
_SEVERAL = (list, tuple, set, frozenset, KeysView, Iterator)


def check_tag(tag: object) -> str:
    """`tag`, if it is one.

    Raises:
        TypeError: not a str.
        ValueError: empty, longer than 255 bytes of UTF-8, no valid Unicode text, with '*' or '/', with a character that
            can't be seen (control and format characters, spaces other than U+0020), or with a space at an end.
    """
    if not isinstance(tag, str):
        raise TypeError(f"a tag is a str, not {type(tag).__name__}")
    _core.check_tag(tag.encode("utf-8", "surrogatepass"))  # a lone surrogate is no UTF-8, and refused as that
    return tag


def check_tags(arguments: Iterable[object]) -> list[str]:
    """The tags that a call names, in the order given and each once.

    An argument is a tag, or several in a list, a tuple, a set, the keys of a dict or a generator. No argument stands
    for every tag.

    Raises:
        TypeError: neither.
        ValueError: a malformed tag; an empty list, which would read as every tag.
    """
    tags: dict[str, None] = {}
    for argument in arguments:
        if isinstance(argument, str) or not isinstance(argument, _SEVERAL):
            tags[check_tag(argument)] = None
            continue
        several = dict.fromkeys(check_tag(tag) for tag in argument)
        if not several:
            raise ValueError("a list names no tag; without arguments, a call is for every tag")
        tags |= several
    return list(tags)


def backup_code(backup: object) -> int:
    """The C API's code of a backup: "ram", "pinned", "disk", or None for no backup.

    Raises:
        ValueError: another one.
    """
    meaning = 'backup must be "ram", "pinned", "disk" or None (no backup: the content is dropped at pause)'
    return _code_of(backup, _BACKUP_CODES, meaning)


def backup_names(mask: int) -> tuple[str | None, ...]:
    """The kinds in a mask of the core, bit 1 << code for each."""
    return tuple(name for name, code in _BACKUP_CODES.items() if mask >> code & 1)


def overflow_code(overflow: object) -> int:
    """The C API's code of an overflow policy: "split", "whole", or None for out of memory.

    Raises:
        ValueError: another one.
    """
    meaning = 'overflow must be "split", "whole" or None (out of memory where the device has too little)'
    return _code_of(overflow, _OVERFLOW_CODES, meaning)


def overflow_name(code: int) -> str:
    """The name of an overflow policy that is on, from its code."""
    return next(name for name, known in _OVERFLOW_CODES.items() if known == code and name is not None)


def _code_of(value: object, codes: Mapping[str | None, int], meaning: str) -> int:
    if value is None or isinstance(value, str):
        code = codes.get(value)
        if code is not None:
            return code
    raise ValueError(f"{meaning}, not {value!r}")


def operation_backup_code(backup: object) -> int:
    """As `backup_code`, and -1 for AS_ALLOCATED."""
    return AS_ALLOCATED_CODE if backup is AS_ALLOCATED else backup_code(backup)


_LONGEST_TIMEOUT = 1e9  # seconds; a longer one, which may be beyond any float, is as long


class PauseRequest(NamedTuple):
    """The tags that a pause takes away, and their backups.

    `code` stands for the tags that `own_codes` leaves out.
    """

    names: list[str]
    code: int = AS_ALLOCATED_CODE
    own_codes: Mapping[str, int] = MappingProxyType({})

    @property
    def codes(self) -> list[int]:
        """A code for each of the names; empty where `code` stands for all."""
        return [self.own_codes[name] for name in self.names] if self.own_codes else []

    def is_kept(self, tag: str, own_backup: int) -> bool:
        """Whether memory of the tag that was allocated with this backup leaves with one."""
        code = self.own_codes.get(tag, self.code)
        return (own_backup if code == AS_ALLOCATED_CODE else code) != NO_BACKUP_CODE


def check_leaving(tags: Sequence[object], backup: object, label: str) -> PauseRequest:
    """The tags that leave: names, which `backup` stands for, or one mapping of each tag to its own backup.

    Raises:
        TypeError: neither; a mapping beside other tags, or beside `backup`.
        ValueError: a malformed tag or backup; a mapping without a tag, which would read as every tag.
    """
    if len(tags) == 1 and isinstance(tags[0], str) and backup is AS_ALLOCATED:  # the usual case
        return PauseRequest([check_tag(tags[0])])
    if not any(isinstance(tag, Mapping) for tag in tags if not isinstance(tag, str)):
        return PauseRequest(check_tags(tags), operation_backup_code(backup))
    if len(tags) > 1 or backup is not AS_ALLOCATED:
        raise TypeError(f"{label} takes tags and backup=, or one dict of each tag to its backup, and nothing beside it")
    given = tags[0]
    assert isinstance(given, Mapping)
    codes = {check_tag(tag): operation_backup_code(one) for tag, one in given.items()}
    if not codes:
        raise ValueError(f"{label} was given a dict that names no tag")
    return PauseRequest(list(codes), own_codes=codes)


def check_flag(value: object, name: str) -> bool:
    """`value` of the argument `name`, if it is a bool.

    Raises:
        TypeError: something else.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name} is True or False, not {value!r}")
    return value


def retain_flag(retain: object, backup: int) -> bool:
    """`retain` of a region, if it goes with the backup's code.

    Raises:
        TypeError: not a bool.
        ValueError: retain without a backup.
    """
    if check_flag(retain, "retain") and backup == NO_BACKUP_CODE:
        raise ValueError("retain=True keeps a backup, and backup=None makes none: choose a backup, or leave retain out")
    return bool(retain)


def exportable_flag(exportable: object, overflow: int) -> bool:
    """`exportable` of a region, if it goes with the overflow's code.

    Raises:
        TypeError: not a bool.
        ValueError: exportable with overflow.
    """
    if check_flag(exportable, "exportable") and overflow != NO_OVERFLOW_CODE:
        raise ValueError("exportable=True is for memory on the device: leave overflow or exportable out")
    return bool(exportable)


def retain_code(retain: object) -> int:
    """The C API's code of `retain` at a resume: 1, 0, and -1 for None (as each region said).

    Raises:
        TypeError: none of these.
    """
    if retain is None:
        return -1
    if not isinstance(retain, bool):
        raise TypeError(f"retain is True, False or None (as each region said), not {retain!r}")
    return int(retain)


def check_timeout(timeout: float | None) -> float:
    """Seconds to go on trying; 0 for None.

    Raises:
        TypeError: no number.
        ValueError: negative, or none.
    """
    if timeout is None:
        return 0.0
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise TypeError(f"timeout is a number of seconds or None, not {type(timeout).__name__}")
    if not timeout >= 0:  # nor is nan, and math.isnan refuses an int beyond any float
        raise ValueError(f"timeout must be a number of seconds, 0 or more: {timeout!r}")
    return float(min(timeout, _LONGEST_TIMEOUT))
