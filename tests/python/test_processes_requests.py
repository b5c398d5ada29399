"""Requests from outside: `ebbtide pause PID` and its like, and the safe points where they are done."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

from asking import (
    MIB,
    SAFE_POINT,
    answer_of,
    arrived,
    ask,
    command,
    entry_of,
    hold,
    is_whole,
    made,
    paused,
    place,
    result,
    safe_point,
    served,
    two,
    variables,
)
from companions import Companion, sharing
from ebbtide.processes import requests

pytestmark = pytest.mark.sim_only


# --- commands ---


def test_another_shell_pauses_and_resumes(two, variables):
    one, _ = two
    hold(one, "weights", 16)
    hold(one, "kv", 12)
    started = command(variables, "pause", str(one.pid), "kv", "--wait")
    served(one)
    status, out, error = result(started)
    assert (status, error) == (0, "") and "pause of kv" in out and "12.0 MiB freed" in out
    assert paused(one) == ["kv"]
    one.start(SAFE_POINT.format(wait=True))
    status, out, _ = result(command(variables, "resume", str(one.pid), "--json"))
    told = json.loads(out)
    assert (status, told["what"], told["tags"], told["bytes"]) == (0, "resume", ["kv"], 12 * MIB)
    found = one.answer()
    assert found["away"] == [] and [each["what"] for each in found["done"]] == ["resume"] and found["seconds"] > 0
    assert is_whole(one, "kv")
    started = command(variables, "trim", str(one.pid), "--wait")
    assert one.run("del tensor_kv; gc.collect()") is None
    served(one)
    status, out, _ = result(started)
    assert status == 0 and "trim of kv" in out and "12.0 MiB freed" in out


def test_a_program_in_the_midst_of_a_step_says_so_and_does_nothing_later(two, variables, place):
    one, _ = two
    hold(one, "weights", 12)
    safe_point(one)
    status, _, error = result(command(variables, "pause", str(one.pid)))
    assert status == 1 and "is in the midst of a step" in error and "--wait waits for the next one" in error
    assert safe_point(one)["done"] == [] and not paused(one)
    waiting = command(variables, "pause", str(one.pid), "--wait")
    while not requests.are_there(place, entry_of(place, one)):
        time.sleep(0.02)
    waiting.send_signal(signal.SIGINT)
    assert result(waiting)[0] == 1 and not requests.are_there(place, entry_of(place, one))


def test_a_program_without_a_safe_point_says_what_it_lacks(variables):
    with sharing("none", 64) as alone:
        one = Companion(**alone).wait_until_ready()
        try:
            assert one.run("from ebbtide.processes import member; member.configure(True)") is None
            status, _, error = result(command(alone, "pause", str(one.pid)))
            assert status == 1 and "has come to no safe point so far" in error and "saver.offer_safe_points()" in error
            waiting = command(alone, "pause", str(one.pid), "--wait")
            time.sleep(1)
            one.kill()
            status, _, error = result(waiting)
            assert status == 1 and "has ended" in error
        finally:
            one.close()
        status, _, error = result(command(alone, "resume", "4711"))
        assert status == 2 and "no process that shares a device has the PID 4711" in error
        assert not list(Path(alone["EBBTIDE_SHARED_FOLDER"]).iterdir())


def test_what_fails_fails_for_the_one_who_asked(two, variables, place):
    one, _ = two
    hold(one, "weights", 12)
    unknown = ask(place, one, "pause", "nobody")
    assert "no region was ever named 'nobody'" in served(one)["done"][0]["problem"]
    assert "nobody" in answer_of(place, unknown).problem
    leased = ask(place, one, "pause", "weights")
    arrived(one)
    found = one.run('with saver.region("weights"): answer = saver.safe_point(wait=True).to_dict()')
    assert found["away"] == [] and "weights" in answer_of(place, leased).problem
    hook = ask(place, one, "pause", "weights")
    arrived(one)
    code = """
    def fail(tag): raise RuntimeError("planted")
    undo = saver.on("before_pause", "weights", fail)
    answer = saver.safe_point(wait=True).to_dict()
    undo()
    """
    assert "planted" in one.run(code)["done"][0]["problem"]
    assert "planted" in answer_of(place, hook).problem
    assert not paused(one) and is_whole(one, "weights")


def test_a_driver_call_that_fails_loses_nothing(two, place):
    one, _ = two
    hold(one, "weights", 12)
    here = str(Path(__file__).parent)
    begin = f"import sys; sys.path.insert(0, {here!r}); from core_sim import Sim; sim = Sim()"
    assert one.run(f"{begin}; sim.fail('cuMemUnmap', 1, 999, 1)") is None
    request = ask(place, one, "pause", "weights")
    found = served(one)
    assert found["done"][0]["problem"] and answer_of(place, request).problem
    assert one.run("sim.clear_failures()") is None
    if found["away"]:
        ask(place, one, "resume")
        assert served(one, wait=True)["away"] == []
    assert is_whole(one, "weights")


def test_an_interrupt_reaches_the_program_and_the_asker_gets_an_answer(two, place):
    one, _ = two
    hold(one, "weights", 12)
    request = ask(place, one, "pause", "weights")
    arrived(one)
    code = """
    def interrupt(tag): raise KeyboardInterrupt
    undo = saver.on("before_pause", "weights", interrupt)
    try:
        saver.safe_point()
    except KeyboardInterrupt:
        answer = "interrupted"
    undo()
    """
    assert one.run(code) == "interrupted"
    assert answer_of(place, request).problem == "the program was interrupted"
    assert safe_point(one)["done"] == [] and is_whole(one, "weights")


# --- what is away ---


def test_what_the_program_has_paused_itself_stays_as_it_is(two, place):
    one, _ = two
    hold(one, "mine", 12)
    hold(one, "weights", 12)
    assert one.run("saver.pause('mine')") is None
    ask(place, one, "pause")
    assert served(one)["away"] == ["weights"]
    one.start(SAFE_POINT.format(wait=True))
    assert not one.has_answered(1)
    ask(place, one, "resume")
    assert one.answer()["away"] == [] and paused(one) == ["mine"]
    assert one.run("saver.resume()") is None
    assert is_whole(one, "mine") and is_whole(one, "weights")


def test_of_a_tag_that_is_half_away_the_other_half_is_waited_for(two, place):
    one, _ = two
    hold(one, "weights", 12)
    assert one.run("saver.pause('weights')") is None
    code = "with saver.region('weights'): tensor_more = torch.full((12 * 2**20,), 7, dtype=torch.uint8)"
    assert one.run(code) is None
    ask(place, one, "pause", "weights")
    arrived(one)
    one.start(SAFE_POINT.format(wait=True))
    assert not one.has_answered(1)
    ask(place, one, "resume")
    assert one.answer()["away"] == [] and is_whole(one, "more")
    assert one.run("answer = saver.is_paused('weights')"), "as the program left it"
    assert one.run("saver.resume('weights')") is None and is_whole(one, "weights")


def test_the_programs_own_resume_ends_the_wait(two, place):
    one, _ = two
    hold(one, "weights", 12)
    ask(place, one, "pause", "weights")
    arrived(one)
    code = """
    import threading
    threading.Timer(0.5, lambda: saver.resume("weights")).start()
    answer = saver.safe_point(wait=True).to_dict()
    """
    found = one.run(code)
    assert found["away"] == [] and found["seconds"] > 0.4 and is_whole(one, "weights")


def test_a_program_that_leaves_the_others_gets_its_memory_back(two, place):
    one, _ = two
    hold(one, "weights", 12)
    ask(place, one, "pause", "weights")
    assert served(one)["away"] == ["weights"]
    assert one.run("saver.configure(shared=False)") is None
    assert safe_point(one, wait=True)["away"] == [] and is_whole(one, "weights")


def test_a_safe_point_in_a_safe_point_does_nothing(two, place):
    one, _ = two
    hold(one, "weights", 12)
    ask(place, one, "pause", "weights")
    ask(place, one, "resume", "weights")
    arrived(one)
    code = """
    inner = []
    undo = saver.on("after_pause", "weights", lambda tag: inner.append(saver.safe_point(wait=True).to_dict()))
    outer = saver.safe_point(wait=True).to_dict()
    undo()
    answer = [len(outer["done"]), inner]
    """
    assert one.run(code) == [2, [{"done": [], "away": [], "seconds": 0.0}]]


def test_all_threads_wait_in_their_safe_points(two, place):
    one, _ = two
    hold(one, "weights", 12)
    ask(place, one, "pause", "weights")
    arrived(one)
    code = """
    from concurrent.futures import ThreadPoolExecutor
    pool = ThreadPoolExecutor(3)
    waits = [pool.submit(saver.safe_point, wait=True) for _ in range(3)]
    import time
    time.sleep(1)
    answer = [each.done() for each in waits]
    """
    assert one.run(code) == [False] * 3
    ask(place, one, "resume")
    assert one.run("answer = sum(len(each.result(20).done) for each in waits); pool.shutdown()") == 2
    assert is_whole(one, "weights")


def test_a_forked_child_does_not_serve_its_parents_requests(two, place):
    one, _ = two
    hold(one, "weights", 12)
    ask(place, one, "pause", "weights")
    arrived(one)
    code = """
    import os
    child = os.fork()
    if child == 0:
        os._exit(len(saver.safe_point(wait=True).done))
    answer = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    """
    assert one.run(code) == 0
    assert [each["what"] for each in served(one)["done"]] == ["pause"]
    assert one.run(code) == 0, "nothing that is away in the parent makes the child wait"
    ask(place, one, "resume")
    assert served(one, wait=True)["away"] == []


def test_a_thread_waits_while_another_one_does_what_is_asked(two, place):
    one, _ = two
    hold(one, "weights", 12)
    ask(place, one, "pause", "weights")
    arrived(one)
    code = """
    import threading, time
    from concurrent.futures import ThreadPoolExecutor
    begun = threading.Event()
    def slow(tag): begun.set(); time.sleep(1)
    undo = saver.on("before_pause", "weights", slow)
    pool = ThreadPoolExecutor(2)
    first = pool.submit(saver.safe_point)
    begun.wait()
    before = time.monotonic()
    assert not saver.safe_point().done and time.monotonic() - before < 0.5, "without wait=True it waits for nobody"
    second = pool.submit(saver.safe_point, wait=True)
    first.result()
    time.sleep(0.3)
    answer = [list(first.result().away), second.done()]
    undo()
    """
    assert one.run(code) == [["weights"], False]
    ask(place, one, "resume")
    assert one.run("answer = list(second.result(20).away); pool.shutdown()") == []


def test_what_the_program_pauses_after_its_own_resume_is_no_requests(two, place):
    one, _ = two
    hold(one, "weights", 12)
    ask(place, one, "pause", "weights")
    assert served(one)["away"] == ["weights"]
    assert one.run("saver.resume('weights'); saver.pause('weights')") is None
    assert safe_point(one, wait=True)["away"] == [] and paused(one) == ["weights"]
    assert one.run("saver.resume()") is None and is_whole(one, "weights")


def test_a_request_keeps_the_content_of_a_region_without_a_backup(two, place):
    one, _ = two
    assert (
        one.run("with saver.region('bare', backup=None): tensor_bare = torch.full((12 * 2**20,), 7, dtype=torch.uint8)")
        is None
    )
    ask(place, one, "pause")
    assert "bare" in served(one)["away"]
    ask(place, one, "resume")
    assert served(one, wait=True)["away"] == [] and is_whole(one, "bare")


def test_a_pause_that_fails_midway_is_undone(two, place):
    one, _ = two
    hold(one, "weights", 12)
    request = ask(place, one, "pause", "weights")
    arrived(one)
    code = """
    def fail(tag): raise RuntimeError("planted")
    undo = saver.on("after_pause", "weights", fail)
    answer = saver.safe_point(wait=True).to_dict()
    undo()
    """
    assert one.run(code)["away"] == []
    assert answer_of(place, request).problem == "planted" and not paused(one) and is_whole(one, "weights")


def test_a_request_does_not_outlive_the_one_who_asks(two, variables, place):
    one, _ = two
    hold(one, "weights", 12)
    safe_point(one)
    waiting = command(variables, "pause", str(one.pid), "--wait")
    while not requests.are_there(place, entry_of(place, one)):
        time.sleep(0.02)
    waiting.kill()
    waiting.communicate()
    time.sleep(requests.LEASE_SECONDS)
    assert safe_point(one)["done"] == [] and not paused(one)


def test_a_stopped_program_is_said_not_to_answer(two, variables):
    one, _ = two
    safe_point(one)
    os.kill(one.pid, signal.SIGSTOP)
    try:
        status, _, error = result(command(variables, "pause", str(one.pid)))
    finally:
        os.kill(one.pid, signal.SIGCONT)
    assert status == 1 and "does not answer, so nothing was done" in error


def test_a_program_that_waits_says_what_for(variables, place):
    one = Companion(**variables).wait_until_ready()
    hold(one, "weights", 12)
    ask(place, one, "pause")
    arrived(one)
    one.start(SAFE_POINT.format(wait=True))
    time.sleep(4)
    ask(place, one, "resume")
    one.answer()
    one.kill()
    said = one.errors()
    assert "waits in a safe point, since weights is away: paused for a test" in said
    assert f"`ebbtide resume {one.pid}` brings it back" in said


# --- what offers safe points ---


def test_the_steps_of_optimizers_are_safe_points_of_an_unmodified_program(two, variables):
    one, _ = two
    hold(one, "weights", 12)
    code = """
    import time
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], 0.1)
    begin, longest = time.monotonic(), 0
    while longest < 1 and time.monotonic() - begin < 20:
        weight.grad, before = torch.ones(4), time.monotonic()
        optimizer.step()
        longest = max(longest, time.monotonic() - before)
        time.sleep(0.01)
    answer = [longest, bool((tensor_weights == 7).all())]
    """
    one.start(code)
    assert result(command(variables, "pause", str(one.pid), "--wait"))[0] == 0
    time.sleep(1)
    assert result(command(variables, "resume", str(one.pid)))[0] == 0
    longest, whole = one.answer()
    assert longest > 1 and whole
