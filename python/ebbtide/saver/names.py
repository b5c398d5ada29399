"""What callers may write for a tag and for a backup."""

import unicodedata
from enum import Enum
from typing import Final, Literal, TypeAlias

BackupName: TypeAlias = Literal["ram", "pinned", "disk"]

TAG_BYTES_MAX = 255
RESERVED = "*/"

# The codes of ebbtide_backup_kind, so that checking an argument needs no library.
_BACKUP_CODES: dict[str | None, int] = {None: 0, "ram": 1}
_NOT_BUILT_YET = ("pinned", "disk")


class _AsAllocated(Enum):
    """The one value that says: each allocation's own policy decides."""

    AS_ALLOCATED = "what each allocation's region said"

    def __repr__(self) -> str:
        return "AS_ALLOCATED"


AS_ALLOCATED: Final = _AsAllocated.AS_ALLOCATED
OperationBackup: TypeAlias = BackupName | Literal[_AsAllocated.AS_ALLOCATED] | None


def check_tag(tag: object) -> str:
    """`tag`, if it is one.

    Raises:
        TypeError: not a str.
        ValueError: empty, longer than 255 bytes of UTF-8, or with '*', '/', a control character or a lone surrogate
            in it.
    """
    if not isinstance(tag, str):
        raise TypeError(f"a tag is a str, not {type(tag).__name__}")
    if not tag:
        raise ValueError("a tag must not be empty")
    try:
        size = len(tag.encode("utf-8"))
    except UnicodeEncodeError:
        raise ValueError("a tag must be valid Unicode text, and this one has a lone surrogate") from None
    if size > TAG_BYTES_MAX:
        raise ValueError(f"a tag is at most {TAG_BYTES_MAX} bytes of UTF-8; this one has {size}: {tag[:24]!r}...")
    for character in tag:
        if character in RESERVED:
            raise ValueError(f"'*' and '/' are reserved in tags: {tag!r}")
        if unicodedata.category(character) == "Cc":
            raise ValueError(f"a tag has no control characters: {tag!r}")
    return tag


def check_tags(tags: tuple[object, ...]) -> list[str]:
    """Each of `tags` checked, duplicates dropped, in the order given. Raises as `check_tag` does."""
    return list(dict.fromkeys(check_tag(tag) for tag in tags))


def backup_code(backup: object) -> int:
    """The C API's code of a backup: "ram", or None for no backup.

    Raises:
        ValueError: unknown, or not built yet.
    """
    if backup is None or isinstance(backup, str):
        code = _BACKUP_CODES.get(backup)
        if code is not None:
            return code
        if backup in _NOT_BUILT_YET:
            raise ValueError(f'backup={backup!r} is not built yet: use backup="ram", or None for no backup')
    raise ValueError(f'backup must be "ram" or None (no backup: the content is dropped at pause), not {backup!r}')


def operation_backup_code(backup: object) -> int:
    """As `backup_code`, and -1 for AS_ALLOCATED."""
    return -1 if backup is AS_ALLOCATED else backup_code(backup)
