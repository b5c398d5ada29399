"""What one process asks another to do: a small JSON file beside the other's entry, and the answer in another file.

The one that is asked takes the file away before it begins, so that a request is done once, and one that was withdrawn
is not done at all. Who waits for the answer looks for its file.
"""

import contextlib
import json
import secrets
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ebbtide.errors import StateError
from ebbtide.processes.folder import ASKED, Folder, read

VERSION = 1
PAUSE, RESUME, TRIM = "pause", "resume", "trim"
_MOST_AT_ONCE = 64
_ASK, _ANSWER = ".ask", ".answer"


@dataclass(frozen=True)
class Request:
    """Of one process to another.

    Attributes:
        what: PAUSE, RESUME or TRIM.
        tags: none means all; of a RESUME, what was paused by requests.
        asker: who asks, for people.
        until: by the clock of `Wait.since`; later it is not begun. 0: at any time.
        is_for_room: the memory is wanted, and comes back when there is room again.
        patience_seconds: how long a RESUME waits for room.
        name: of its file, less the ending: the entry's name, a time and eight random digits.
    """

    what: str
    tags: list[str]
    asker: str
    until: int = 0
    is_for_room: bool = False
    patience_seconds: float = 0.0
    name: str = ""


@dataclass(frozen=True)
class Answer:
    """What came of a request. problem: why it failed; "" if it did not. tags: those that were moved."""

    tags: list[str]
    bytes: int
    seconds: float
    problem: str = ""


def ask(folder: Folder, of: str, request: Request) -> Request:
    """Asks the process with this entry. Returns the request with its name."""
    name = f"{of}.{time.monotonic_ns():020d}-{secrets.token_hex(4)}"
    named = replace(request, name=name)
    _write(folder.place / (name + _ASK), asdict(named))
    folder.send(ASKED, [of])
    return named


def withdraw(folder: Folder, request: Request) -> bool:
    """False: it has been begun, or its process is gone."""
    return _take(folder.place / (request.name + _ASK))


def is_open(folder: Folder, request: Request) -> bool:
    """Whether it waits to be begun."""
    return (folder.place / (request.name + _ASK)).exists()


def take_answer(folder: Folder, request: Request) -> Answer | None:
    """None: there is none yet."""
    file = folder.place / (request.name + _ANSWER)
    text = read(file)
    if text is None:
        return None
    _take(file)
    try:
        found = json.loads(text)
        tags = [str(tag) for tag in found["tags"]]
        return Answer(tags, int(found["bytes"]), float(found["seconds"]), str(found["problem"]))
    except (ValueError, TypeError, KeyError, RecursionError):
        return Answer([], 0, 0.0, "its answer can't be read: it has another version of ebbtide")


def are_there(folder: Folder, name: str) -> bool:
    return next(folder.place.glob(f"{name}.*{_ASK}"), None) is not None


def begin_next(folder: Folder, name: str) -> Request | None:
    """The oldest request to the process with this entry, which no other thread begins. None: there is none. What is no
    request, or of another version, is removed."""
    for file in sorted(folder.place.glob(f"{name}.*{_ASK}"))[:_MOST_AT_ONCE]:
        text = read(file)
        if text is None or not _take(file):
            continue
        request = _parse(text, file.name.removesuffix(_ASK))
        if request is not None and not 0 < request.until < time.monotonic_ns():
            return request
    return None


def answer(folder: Folder, request: Request, found: Answer) -> None:
    """Nobody may wait for it any more: then its file stays until its process ends."""
    with contextlib.suppress(StateError):
        _write(folder.place / (request.name + _ANSWER), asdict(found))


def _parse(text: bytes, name: str) -> Request | None:
    try:
        found = json.loads(text)
        if found.pop("version") != VERSION or found.pop("name") != name:
            return None
        request = Request(name=name, **found)
        numbers = (request.until + 0, request.patience_seconds + 0.0)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    texts = [request.asker, *request.tags] if isinstance(request.tags, list) else [None]
    is_right = request.what in (PAUSE, RESUME, TRIM) and all(isinstance(each, str) for each in texts)
    return request if is_right and min(numbers) >= 0 else None


def _write(file: Path, content: dict[str, object]) -> None:
    new = file.with_name(file.name + ".new")
    try:
        new.write_text(json.dumps({"version": VERSION, **content}))
        new.replace(file)
    except OSError as error:
        raise StateError(f"{file} can't be written: {error.strerror}") from None


def _take(file: Path) -> bool:
    try:
        file.unlink()
    except OSError:
        return False
    return True
