"""What one process asks another to do: a small JSON file beside the other's entry, and the answer in another file.

The one that is asked renames the file before it begins, so that a request is done once, and one that was withdrawn is
not done at all. A request holds for some seconds, and the one who asks renews it: none outlives its asker for long. Who
waits for the answer looks for its file.
"""

import contextlib
import itertools
import json
import secrets
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ebbtide.errors import StateError
from ebbtide.processes.folder import ASKED, Folder, read

VERSION = 1
PAUSE, RESUME, TRIM = "pause", "resume", "trim"
LEASE_SECONDS = 3.0
_MOST_AT_ONCE = 64
_ASK, _BEGUN, _ANSWER = ".ask", ".begun", ".answer"
_ANSWER_SECONDS = 60.0  # that nobody takes
_OTHER_VERSION = "the two programs have different versions of ebbtide"


@dataclass(frozen=True)
class Request:
    """Of one process to another.

    Attributes:
        what: PAUSE, RESUME or TRIM.
        tags: none means all; of a RESUME, what was paused by requests.
        asker: who asks, for people.
        wanted_bytes: of a PAUSE for another's resume: so much, and what was paused comes back when there is room again.
        until: by the clock of `Wait.since`; later it is not begun.
        name: of its file, less the ending: the entry's name, a time and eight random digits.
    """

    what: str
    tags: list[str]
    asker: str
    wanted_bytes: int = 0
    until: int = 0
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
    named = replace(request, name=name, until=_lease_end())
    _write(folder.place / (name + _ASK), asdict(named))
    folder.send(ASKED, [of])
    return named


def renew(folder: Folder, request: Request) -> Request:
    """The same for as long again, unless it has been begun."""
    if not withdraw(folder, request):
        return request
    renewed = replace(request, until=_lease_end())
    _write(folder.place / (request.name + _ASK), asdict(renewed))
    return renewed


def withdraw(folder: Folder, request: Request) -> bool:
    """False: it has been begun, or its process is gone."""
    return _remove(folder.place / (request.name + _ASK))


def is_known(folder: Folder, request: Request) -> bool:
    """Whether it waits to be begun, or is being done."""
    return any((folder.place / (request.name + ending)).exists() for ending in (_ASK, _BEGUN))


def take_answer(folder: Folder, request: Request) -> Answer | None:
    """None: there is none yet."""
    file = folder.place / (request.name + _ANSWER)
    text = read(file)
    if text is None:
        return None
    _remove(file)
    try:
        found = json.loads(text)
        tags = [str(tag) for tag in found["tags"]]
        return Answer(tags, int(found["bytes"]), float(found["seconds"]), str(found["problem"]))
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return Answer([], 0, 0.0, _OTHER_VERSION)


def are_there(folder: Folder, name: str) -> bool:
    """Also those that an interrupt has left begun."""
    is_left = next(folder.place.glob(f"{name}.*{_BEGUN}"), None) is not None
    return is_left or next(_readable(folder, name), None) is not None


def begin_next(folder: Folder, name: str) -> Request | None:
    """The oldest request to the process with this entry, which no other thread begins. None: there is none. One of
    another version is answered. What is no request, or nobody waits for any more, is removed."""
    for file, text in _readable(folder, name):
        begun = file.with_suffix(_BEGUN)
        try:
            file.rename(begun)
        except OSError:
            continue
        request = _parse(text, file.stem)
        if request is None:
            answer(folder, Request("", [], "", name=file.stem), Answer([], 0, 0.0, _OTHER_VERSION))
        elif request.until < time.monotonic_ns():
            _remove(begun)
        else:
            return request
    return None


def answer(folder: Folder, request: Request, found: Answer) -> None:
    """Nobody may wait for it any more: its file goes with a later answer, or with its process."""
    with contextlib.suppress(StateError):
        if not request.wanted_bytes:
            _write(folder.place / (request.name + _ANSWER), asdict(found))
    _remove(folder.place / (request.name + _BEGUN))
    for file in folder.place.glob(f"{request.name.partition('.')[0]}.*{_ANSWER}"):
        with contextlib.suppress(OSError):
            if time.time() - file.stat().st_mtime > _ANSWER_SECONDS:
                file.unlink()


def answer_left(folder: Folder, name: str) -> None:
    """Those to this process that an interrupt has left begun, and no thread does."""
    for file in folder.place.glob(f"{name}.*{_BEGUN}"):
        answer(folder, Request("", [], "", name=file.stem), Answer([], 0, 0.0, "the program was interrupted"))


def _readable(folder: Folder, name: str) -> Iterator[tuple[Path, bytes]]:
    texts = ((file, read(file)) for file in sorted(folder.place.glob(f"{name}.*{_ASK}")))
    return itertools.islice(((file, text) for file, text in texts if text is not None), _MOST_AT_ONCE)


def _lease_end() -> int:
    return time.monotonic_ns() + int(LEASE_SECONDS * 1e9)


def _parse(text: bytes, name: str) -> Request | None:
    try:
        found = json.loads(text)
        if found.pop("version") != VERSION or found.pop("name") != name:
            return None
        request = Request(name=name, **found)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    texts = [request.asker, *request.tags] if isinstance(request.tags, list) else [None]
    is_right = request.what in (PAUSE, RESUME, TRIM) and all(isinstance(each, str) for each in texts)
    return request if is_right and type(request.until) is type(request.wanted_bytes) is int else None


def _write(file: Path, content: dict[str, object]) -> None:
    new = file.with_name(file.name + ".new")
    try:
        new.write_text(json.dumps({"version": VERSION, **content}))
        new.replace(file)
    except OSError as error:
        raise StateError(f"{file} can't be written: {error.strerror}") from None


def _remove(file: Path) -> bool:
    try:
        file.unlink()
    except OSError:
        return False
    return True
