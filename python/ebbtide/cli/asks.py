"""`ebbtide pause`, `ebbtide resume` and `ebbtide trim`."""

import json
import os
import time
from dataclasses import asdict
from pathlib import Path

import click

from ebbtide.processes import folder, requests
from ebbtide.processes.entries import Entry
from ebbtide.sizes import format_size

_PATIENCE_SECONDS = 1.0  # without --wait
_LOOK_SECONDS = 0.02
_GRACE_SECONDS = 0.2  # between the end of a request and its answer
_DONE = {requests.PAUSE: "freed", requests.RESUME: "claimed", requests.TRIM: "freed"}

_process = click.argument("process", metavar="PID")
_tags = click.argument("tags", nargs=-1, metavar="[TAG]...")
_wait = click.option("--wait", is_flag=True, help="Wait for the next safe point, however long that takes.")
_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object, with sizes in bytes.")


@click.command()
@_process
@_tags
@_wait
@_json
def pause(process: str, tags: tuple[str, ...], wait: bool, as_json: bool) -> None:
    """Pause tags of another program, or all of them, at its next safe point.

    The program has to share (EBBTIDE_SHARED=1, ebbtide run --shared, saver.configure(shared=True)), and waits in its
    safe point until the tags are back. PID is one of `ebbtide ps`.
    """
    _ask(process, requests.Request(requests.PAUSE, [*tags], _asker()), wait, as_json)


@click.command()
@_process
@_tags
@_wait
@_json
def resume(process: str, tags: tuple[str, ...], wait: bool, as_json: bool) -> None:
    """Resume tags of another program, whoever paused them.

    Without tags: what ebbtide pause has paused there, and others by such requests.
    """
    _ask(process, requests.Request(requests.RESUME, [*tags], _asker()), wait, as_json)


@click.command()
@_process
@_tags
@_wait
@_json
def trim(process: str, tags: tuple[str, ...], wait: bool, as_json: bool) -> None:
    """Make another program release the memory of dead tensors in its tags."""
    _ask(process, requests.Request(requests.TRIM, [*tags], _asker()), wait, as_json)


def _asker() -> str:
    return f"ebbtide {os.getpid()}"


def _ask(process: str, request: requests.Request, wait: bool, as_json: bool) -> None:
    place = folder.Folder(folder.path()) if Path(folder.path()).exists() else None
    entry = _find([] if place is None else place.fresh_entries(), process)
    assert place is not None  # it has an entry
    answer = _await(place, entry, requests.ask(place, entry.name, request), wait)
    who = f"{entry.program} {entry.pid}"
    if answer is None:
        raise click.ClickException(f"{who} {_why_not(place, entry)}")
    if as_json:
        click.echo(json.dumps({"pid": entry.pid, "program": entry.program, "what": request.what, **asdict(answer)}))
    elif not answer.problem:
        named = ", ".join(answer.tags) or "nothing"
        seconds, size = f"{answer.seconds:.2f} s", format_size(answer.bytes)
        click.echo(f"{who}: {request.what} of {named} in {seconds}, {size} {_DONE[request.what]}")
    if answer.problem:
        raise click.ClickException(f"{who} could not {request.what}: {answer.problem}")


def _find(entries: list[Entry], process: str) -> Entry:
    found = [entry for entry in entries if process in (str(entry.pid), entry.name)]
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(entry.name for entry in found)
        raise click.UsageError(f"{len(found)} processes call themselves {process}, in containers: name one of {names}")
    raise click.UsageError(f"no process that shares a device has the PID {process}: `ebbtide ps` lists them")


def _await(place: folder.Folder, entry: Entry, asked: requests.Request, wait: bool) -> requests.Answer | None:
    """None: it was not begun in time, and is withdrawn, or the process is gone."""
    try:
        return _look_until_answered(place, entry, asked, wait)
    finally:
        requests.withdraw(place, asked)


def _look_until_answered(
    place: folder.Folder, entry: Entry, asked: requests.Request, wait: bool
) -> requests.Answer | None:
    begin = renewed = time.monotonic()
    while (answer := requests.take_answer(place, asked)) is None:
        now = time.monotonic()
        if not wait and now - begin > _PATIENCE_SECONDS and requests.withdraw(place, asked):
            return None
        if now - renewed > requests.LEASE_SECONDS / 3:
            asked, renewed = requests.renew(place, asked), now
        is_known = requests.is_known(place, asked)
        if not is_known or not any(each.name == entry.name for each in place.entries()):
            time.sleep(_GRACE_SECONDS)
            return requests.take_answer(place, asked)
        time.sleep(_LOOK_SECONDS)
    return answer


def _why_not(place: folder.Folder, entry: Entry) -> str:
    asked_at = time.monotonic_ns()
    now = next((each for each in place.fresh_entries() if each.name == entry.name), None)
    if now is None:
        return "has ended, or shares no longer"
    if now.told_at < asked_at:
        seconds = (asked_at - now.told_at) / 1e9
        return f"does not answer, so nothing was done: it is stopped or busy, and was heard of {seconds:.1f} s ago"
    if now.safe_point_at == 0:
        return (
            "has come to no safe point so far, so nothing was done. It needs saver.offer_safe_points(), or "
            "saver.safe_point() in its loop; --wait waits for the first one"
        )
    seconds = max(0, time.monotonic_ns() - now.safe_point_at) / 1e9
    return (
        f"is in the midst of a step, so nothing was done: its last safe point was {seconds:.1f} s ago. --wait waits "
        "for the next one"
    )
