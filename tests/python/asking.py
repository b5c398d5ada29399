"""For the tests of requests between processes: two processes, and how to ask them."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from companions import Companion, running, sharing
from ebbtide.processes import folder, requests

MIB = 2**20
CLEAN = """
import gc
for name in [name for name in globals() if name.startswith("tensor_")]:
    del globals()[name]
gc.collect()
saver.configure(shared=True, give_up=None)
saver.safe_point()
saver.pause(missing_ok=True)
saver.resume(missing_ok=True)
saver.trim()
answer = saver.stats()["device_bytes"]
"""
SAFE_POINT = "answer = saver.safe_point(wait={wait}).to_dict()"


@pytest.fixture(scope="module")
def variables() -> Iterator[dict[str, str]]:
    with sharing("requests", 64) as found:
        yield found


@pytest.fixture(scope="module")
def made(variables: dict[str, str]) -> Iterator[list[Companion]]:
    with running(2, variables) as found:
        yield found


@pytest.fixture
def two(made: list[Companion]) -> Iterator[list[Companion]]:
    for one in made:
        assert one.run(CLEAN) == 0
    yield made
    for one in made:
        assert one.run(CLEAN) == 0


@pytest.fixture
def place(variables: dict[str, str]) -> folder.Folder:
    return folder.Folder(Path(variables["EBBTIDE_SHARED_FOLDER"]))


def hold(process: Companion, tag: str, mib: int) -> None:
    code = f"""
    with saver.region("{tag}"):
        tensor_{tag} = torch.full(({mib} * 2**20,), 7, dtype=torch.uint8)
    """
    assert process.run(code) is None


def is_whole(process: Companion, tag: str) -> object:
    return process.run(f"answer = bool((tensor_{tag} == 7).all())")


def safe_point(process: Companion, wait: bool = False) -> dict[str, list]:
    found = process.run(SAFE_POINT.format(wait=wait))
    assert isinstance(found, dict) and "error" not in found, found
    return found


def served(process: Companion, wait: bool = False) -> dict[str, list]:
    """The first safe point that found a request."""
    deadline = time.monotonic() + 20
    while not (found := safe_point(process, wait))["done"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def command(variables: dict[str, str], *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "ebbtide.cli", *arguments],
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def result(started: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, error = started.communicate(timeout=60)
    return started.returncode, out, error


def entry_of(place: folder.Folder, process: Companion) -> str:
    return next(entry.name for entry in place.entries() if entry.pid == process.pid)


def ask(place: folder.Folder, process: Companion, what: str, *tags: str, **options: object) -> requests.Request:
    request = requests.Request(what, list(tags), "a test", **options)
    return requests.ask(place, entry_of(place, process), request)


def arrived(process: Companion) -> None:
    """The process knows of a request."""
    assert process.run("from ebbtide.processes import member; import time") is None
    assert process.run("while not member.has_requests(): time.sleep(0.01)") is None


def answer_of(place: folder.Folder, request: requests.Request) -> requests.Answer:
    deadline = time.monotonic() + 30
    while (found := requests.take_answer(place, request)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def paused(process: Companion) -> list[str]:
    found = process.run("answer = [tag for tag, row in saver.tags().items() if row.state == 'paused']")
    assert isinstance(found, list)
    return found
