"""The folder in which processes meet, its entries, and the order of the queue: without other processes."""

import json
import os
import socket
import tempfile
from pathlib import Path

import pytest
from ebbtide.errors import StateError
from ebbtide.processes.entries import VERSION, Entry, TagHolding, Wait, read_entry
from ebbtide.processes.folder import ROOM, Folder, Membership
from ebbtide.processes.queue import can_never_start, describe_holders, startable_before

GIB = 2**30
CARD = "ab" * 16


def process(name: str, held: int = 0, wanted: int = 0, since: int = 1, is_alone: bool = True) -> Entry:
    tags = [TagHolding(CARD, f"tag_{name}", held * GIB, 0)] if held else []
    waits = [Wait(CARD, wanted * GIB, ["weights"], since, is_alone)] if wanted else []
    return Entry(name, 4711, "train.py", 0, tags, waits)


# --- the order of the queue ---


def test_those_that_could_start_and_came_earlier_are_first():
    waits = process("early", wanted=4, since=10).waits
    assert startable_before(5, waits, CARD, 8 * GIB) == []
    assert startable_before(20, waits, CARD, 8 * GIB) == waits
    assert startable_before(20, waits, CARD, 3 * GIB) == []
    assert startable_before(20, waits, "cd" * 16, 8 * GIB) == []


@pytest.mark.parametrize(
    ("others", "movable", "is_stuck"),
    [
        ([], 0, True),
        ([process("idle", held=9)], 0, False),  # one is free
        ([process("waits", held=20, wanted=30)], 0, True),
        ([process("later", held=20, wanted=30, since=9)], 0, False),  # that one is refused
        ([process("threads", held=20, wanted=30, is_alone=False)], 0, False),
        ([process("waits", held=20, wanted=1)], 0, False),  # it goes on, and then may give up its memory
        ([process("waits", held=20, wanted=8), process("idle", held=7)], 0, False),
        ([process("a", held=5, wanted=8), process("b", held=5, wanted=8)], 0, True),
        ([process("a", held=5, wanted=8), process("b", held=5, wanted=8)], 9, False),
    ],
)
def test_a_circle_of_waits_is_found(others, movable, is_stuck):
    mine = Wait(CARD, 10 * GIB, ["weights"], since=5)
    assert can_never_start(mine, others, GIB, movable * GIB) is is_stuck


def test_holders_are_described_with_their_tags_and_waits():
    told = describe_holders([process("small", held=1), process("large", held=61, wanted=2), process("none")], CARD)
    assert told == (
        "train.py 4711 holds 61.0 GiB: tags tag_large; waits for 2.0 GiB. "
        "train.py 4711 holds 1.0 GiB: tags tag_small; waits for nothing"
    )
    assert describe_holders([process("elsewhere", held=1)], "cd" * 16) == ""


# --- entries ---


def test_an_entry_is_read_as_it_was_written():
    entry = process("name", held=1, wanted=2, since=3)
    assert read_entry("name", entry.to_text().encode()) == entry


def test_what_is_no_entry_is_none():
    good = json.loads(process("name", held=1, wanted=1).to_text())
    bad = [
        {**good, "version": VERSION + 1},
        {**good, "name": "another"},
        {**good, "more": 1},
        {**good, "pid": "1"},
        {**good, "pid": -1},
        {**good, "tags": [{**good["tags"][0], "resident_bytes": 1.5}]},
        {**good, "tags": [{**good["tags"][0], "tag": None}]},
        {**good, "waits": {}, "tags": 5},
        {**good, "waits": [{**good["waits"][0], "tags": [1]}]},
        {name: value for name, value in good.items() if name != "waits"},
    ]
    texts = [json.dumps(each).encode() for each in bad] + [b"", b"[]", b"\xff", b"[" * 100_000]
    assert [read_entry("name", text) for text in texts] == [None] * len(texts)


# --- the folder ---


@pytest.fixture
def short_path():
    """pytest's own are too long for the address of a socket."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


@pytest.fixture
def folder(short_path):
    return Folder(short_path / "place")


def names(folder):
    return sorted(path.name for path in folder.place.iterdir())


def test_the_folder_is_this_users_alone(folder):
    assert folder.place.stat().st_mode & 0o777 == 0o700
    folder.place.chmod(0o750)
    with pytest.raises(StateError, match="is open to other users: chmod 700"):
        Folder(folder.place)


def test_a_folder_that_is_none_or_anothers_is_refused(short_path, monkeypatch):
    short_path.chmod(0o700)
    (short_path / "file").write_text("")
    (short_path / "link").symlink_to(short_path)
    for bad in ("file", "link"):
        with pytest.raises(StateError, match="is no folder"):
            Folder(short_path / bad)
    with pytest.raises(StateError, match="can't be used: No such file"):
        Folder(short_path / "missing" / "place")
    with pytest.raises(StateError, match="too long for the address of a socket"):
        Folder(short_path / ("x" * 100))
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(StateError, match="is another user's"):
        Folder(short_path)


def test_files_of_the_dead_are_removed_and_those_of_others_left_alone(folder):
    dead = "1-0123abcd"
    for name in (f"{dead}.lock", f"{dead}.json", f"{dead}.json.new", f"{dead}.sock", "poetry.lock", "poetry.json"):
        (folder.place / name).write_text("{}")
    (folder.place / "2-00000000.lock").symlink_to(folder.place / "poetry.lock")
    (folder.place / "3-00000000.lock").mkdir()
    os.mkfifo(folder.place / "4-00000000.lock")
    assert folder.entries() == []
    left = ["2-00000000.lock", "3-00000000.lock", "4-00000000.lock", "poetry.json", "poetry.lock"]
    assert names(folder) == left


def test_a_member_leaves_nothing_behind(folder):
    member = Membership(folder)
    folder.write(Entry(member.name, member.pid, "train.py"))
    assert names(folder) == [f"{member.name}{ending}" for ending in (".json", ".lock", ".sock")]
    folder.send(ROOM, [member.name, "nobody"])
    assert member.socket.recv(10) == ROOM
    assert folder.entries() == [] and member.is_there()  # it does not take itself for dead
    for _ in range(1000):  # more than its socket takes
        folder.send(ROOM, [member.name])
    member.leave()
    assert names(folder) == []


def test_a_full_folder_is_an_error_and_the_entry_stays(folder, monkeypatch):
    member = Membership(folder)
    folder.write(Entry(member.name, member.pid, "before"))

    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", refuse)
    with pytest.raises(StateError, match="No space left"):
        folder.write(Entry(member.name, member.pid, "after"))
    assert b"before" in (folder.place / f"{member.name}.json").read_bytes()
    member.leave()


def test_where_no_socket_can_be_had_nobody_joins(folder, monkeypatch):
    def refuse(*_):
        raise OSError(13, "Permission denied")

    class Refusing(socket.socket):
        bind = refuse

    monkeypatch.setattr(socket, "socket", Refusing)
    with pytest.raises(StateError, match="Permission denied"):
        Membership(folder)
    assert names(folder) == []
