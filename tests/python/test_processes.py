"""Processes that share a device: who sees whom, and who is next."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

from companions import Companion, running, sharing

pytestmark = pytest.mark.sim_only

MIB = 2**20
CAPACITY = 64


@pytest.fixture(scope="module")
def variables() -> Iterator[dict[str, str]]:
    with sharing("processes", CAPACITY) as found:
        yield found


@pytest.fixture(scope="module")
def place(variables: dict[str, str]) -> Path:
    return Path(variables["EBBTIDE_SHARED_FOLDER"])


@pytest.fixture(scope="module")
def companions(variables: dict[str, str]) -> Iterator[list[Companion]]:
    with running(3, variables) as made:
        yield made


HELD = """
with saver.region("{tag}"):
    tensors = globals().setdefault("tensors", dict())
    tensors["{tag}"] = torch.full(({mib} * 2**20,), 7, dtype=torch.uint8)
"""
CLEAN = """
import gc
globals().get("tensors", dict()).clear()
gc.collect()
saver.pause(missing_ok=True)
saver.resume(missing_ok=True)
saver.trim()
answer = saver.stats()["device_bytes"]
"""


@pytest.fixture
def three(companions: list[Companion]) -> Iterator[list[Companion]]:
    yield companions
    for one in companions:
        assert one.run(CLEAN) == 0


def hold(process: Companion, tag: str, mib: int) -> None:
    assert process.run(HELD.format(tag=tag, mib=mib)) is None


def resume(process: Companion, tag: str, timeout: float | None = 60) -> None:
    process.start(f"answer = saver.resume('{tag}', timeout={timeout}).bytes // 2**20")


def pause(process: Companion, tag: str) -> None:
    assert process.run(f"answer = saver.pause('{tag}').bytes") != 0


@pytest.fixture
def ps(variables: dict[str, str]) -> Callable[[], list[dict]]:
    def show() -> list[dict]:
        command = [sys.executable, "-m", "ebbtide.cli", "ps", "--json"]
        return json.loads(subprocess.check_output(command, env={**os.environ, **variables}, text=True))

    return show


def wait_until_it_waits(ps: Callable[[], list[dict]], process: Companion) -> dict:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        [entry] = [entry for entry in ps() if entry["pid"] == process.pid]
        if entry["waits"]:
            return entry
    raise AssertionError("it does not wait")


def test_a_resume_waits_for_the_room_of_another_process(three, ps):
    engine, trainer, _ = three
    hold(engine, "kv_cache", 40)
    pause(engine, "kv_cache")
    hold(trainer, "weights", 40)
    refused = engine.run("saver.resume('kv_cache')")
    assert refused["error"] == "OutOfMemoryError"
    assert f"python {trainer.pid} holds 40.0 MiB: tags weights; waits for nothing" in refused["text"]
    resume(engine, "kv_cache")
    waiting = wait_until_it_waits(ps, engine)
    [holding], [wait] = waiting["tags"], waiting["waits"]
    assert (holding["tag"], holding["resident_bytes"], holding["stored_bytes"]) == ("kv_cache", 0, 40 * MIB)
    assert (wait["tags"], wait["wanted_bytes"]) == (["kv_cache"], 40 * MIB)
    pause(trainer, "weights")
    assert engine.answer() == 40
    assert engine.run("answer = bool((tensors['kv_cache'] == 7).all())") is True
    [holding] = next(entry for entry in ps() if entry["pid"] == engine.pid)["tags"]
    assert holding["resident_bytes"] == 40 * MIB


def test_who_came_first_is_first(three, ps):
    holder, first, second = three
    for process, tag in ((first, "first"), (second, "second")):
        hold(process, tag, 40)
        pause(process, tag)
    hold(holder, "held", 48)
    resume(first, "first")
    wait_until_it_waits(ps, first)
    resume(second, "second")
    wait_until_it_waits(ps, second)
    pause(holder, "held")
    assert first.answer() == 40
    assert not second.has_answered(0.5)
    pause(first, "first")
    assert second.answer() == 40


def test_who_needs_less_than_is_free_overtakes_who_can_not_start(three, ps):
    holder, large, small = three
    hold(large, "large", 40)
    pause(large, "large")
    hold(small, "small", 12)
    pause(small, "small")
    hold(holder, "held", 48)
    resume(large, "large")
    wait_until_it_waits(ps, large)
    resume(small, "small")
    assert small.answer() == 12
    assert not large.has_answered()
    pause(holder, "held")
    assert large.answer() == 40


def test_of_two_that_wait_for_each_other_the_second_is_refused(three, ps):
    one, other, _ = three
    for process in (one, other):
        hold(process, "away", 24)
        pause(process, "away")
    for process in (one, other):
        hold(process, "here", 32)
    resume(one, "away")
    wait_until_it_waits(ps, one)
    resume(other, "away")
    refused = other.answer()
    assert refused["error"] == "OutOfMemoryError" and "wait for one another" in refused["text"]
    pause(other, "here")
    assert one.answer() == 24


def test_the_dead_wait_for_nothing_and_hold_nothing(three, variables, place, ps):
    holder, waiting, _ = three
    dead = Companion(**variables).wait_until_ready()
    hold(dead, "dead", 40)
    pause(dead, "dead")
    hold(waiting, "waiting", 40)
    pause(waiting, "waiting")
    hold(holder, "held", 48)
    resume(dead, "dead")
    wait_until_it_waits(ps, dead)
    resume(waiting, "waiting")
    wait_until_it_waits(ps, waiting)
    dead.kill()
    pause(holder, "held")
    assert waiting.answer() == 40
    assert dead.pid not in [entry["pid"] for entry in ps()]
    assert not [file for file in place.iterdir() if file.name.startswith(f"{dead.pid}-")]
    dead.close()


def test_a_long_wait_says_whom_it_waits_for(three, variables):
    holder, _, _ = three
    hold(holder, "held", 48)
    waiting = Companion(**variables).wait_until_ready()
    assert waiting.run("from ebbtide.processes import queue; queue._SILENT_SECONDS = 0.1") is None
    pause_and_fill = "saver.pause('waiting')"
    holder.run("saver.pause('held')")
    hold(waiting, "waiting", 40)
    waiting.run(pause_and_fill)
    holder.run("saver.resume('held')")
    resume(waiting, "waiting", timeout=3)
    assert waiting.answer()["error"] == "OutOfMemoryError"
    said = waiting.errors()
    assert f"the resume of waiting waits for 40.0 MiB of device 0, where 16.0 MiB are free. python {holder.pid}" in said
    assert said.count("waits for 40.0 MiB") == 1


def test_three_take_turns_and_lose_nothing(three):
    turns = """
        saver.pause("turns")
        for turn in range(10):
            saver.resume("turns", timeout=60)
            assert bool((tensors["turns"] == turn).all())
            tensors["turns"].add_(1)
            saver.pause("turns")
    """
    for process in three:
        process.run("saver.pause(missing_ok=True)")
        hold(process, "turns", 40)
        process.run("tensors['turns'].zero_(); saver.pause('turns')")
    for process in three:
        process.start(turns)
    assert [process.answer() for process in three] == [None] * 3


def test_a_process_leaves_and_comes_back(three, ps):
    one = three[0]
    one.run(HELD.format(tag="weights", mib=2))
    one.run("saver.configure(shared=False)")
    assert one.pid not in [entry["pid"] for entry in ps()]
    assert one.run("answer = saver.settings()['shared']") is False
    one.run("saver.configure(shared=True)")
    [entry] = [entry for entry in ps() if entry["pid"] == one.pid]
    assert entry["tags"][0]["tag"] == "weights"


def test_what_was_just_allocated_is_shown(three, ps):
    one = three[0]
    hold(one, "late", 12)
    [entry] = [entry for entry in ps() if entry["pid"] == one.pid]
    assert ("late", 12 * MIB) in [(tag["tag"], tag["resident_bytes"]) for tag in entry["tags"]]


def test_a_forked_child_takes_no_part(three, ps):
    one = three[0]
    hold(one, "weights", 2)
    code = """
        import os
        child = os.fork()
        if child == 0:
            from ebbtide.processes import member
            os._exit(0 if member.files() is None else 1)
        answer = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    """
    assert one.run(code) == 0
    assert [entry["pid"] for entry in ps()].count(one.pid) == 1
