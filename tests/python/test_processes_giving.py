"""Tags that a process gives up for another's resume, and files that are no requests."""

import time

import pytest

pytest.importorskip("torch")

from asking import (
    SAFE_POINT,
    answer_of,
    arrived,
    ask,
    entry_of,
    hold,
    is_whole,
    made,
    paused,
    place,
    safe_point,
    served,
    two,
    variables,
)
from companions import Companion
from ebbtide.processes import folder, requests

pytestmark = pytest.mark.sim_only


# --- room ---


def test_what_is_offered_is_given_up_and_comes_back_in_turn(two):
    one, other = two
    hold(one, "weights1", 16)
    hold(one, "kv1", 24)
    assert one.run("saver.configure(give_up='kv1'); answer = saver.settings()['give_up']") == ["kv1"]
    hold(other, "big1", 24)
    assert other.run("saver.pause('big1')") is None
    hold(other, "small1", 16)
    other.start("saver.resume('big1', timeout=30); answer = bool((tensor_big1 == 7).all())")
    assert not other.has_answered(1)
    one.start(SAFE_POINT.format(wait=True))
    assert other.answer() is True
    assert not one.has_answered(1), "its own waits for room"
    assert other.run("saver.pause('big1')") is None
    found = one.answer()
    assert [each["tags"] for each in found["done"]] == [["kv1"]] and found["away"] == []
    assert found["done"][0]["asker"] == f"python {other.pid}"
    assert is_whole(one, "kv1") and not paused(one)


def test_nothing_is_given_up_where_it_is_too_little_or_not_offered(two, place):
    one, other = two
    hold(one, "weights2", 30)
    hold(one, "kv2", 12)
    assert one.run("saver.configure(give_up=['kv2'])") is None
    hold(other, "big2", 20)
    assert other.run("saver.pause('big2')") is None
    hold(other, "small2", 20)
    other.start("saver.resume('big2', timeout=2)")
    time.sleep(1)
    assert safe_point(one)["done"] == []
    assert other.answer()["error"] == "OutOfMemoryError"
    ask(place, one, "pause", "weights2", wanted_bytes=1)
    arrived(one)
    assert safe_point(one)["done"] == [] and not paused(one)


def test_a_waiter_that_has_gone_leaves_no_request(two, place):
    one, other = two
    hold(one, "kv3", 30)
    assert one.run("saver.configure(give_up=['kv3'])") is None
    hold(other, "big3", 24)
    assert other.run("saver.pause('big3')") is None
    hold(other, "small3", 12)
    assert other.run("saver.resume('big3', timeout=1)")["error"] == "OutOfMemoryError"
    assert not requests.are_there(place, entry_of(place, one))


LOOP = """
import time
ends = time.monotonic() + 8
while time.monotonic() < ends:
    saver.safe_point(wait=True)
    time.sleep(1)
answer = True
"""


def test_two_that_give_up_make_room_for_one(two, variables):
    """Neither takes its own back before the other one has given up and the waiter has begun."""
    one, other = two
    third = Companion(**variables).wait_until_ready()
    hold(third, "big4", 44)
    assert third.run("saver.pause()") is None
    for process, tag in ((one, "give4a"), (other, "give4b")):
        hold(process, tag, 22)
        assert process.run(f"saver.configure(give_up=[{tag!r}])") is None
    third.start("saver.resume(timeout=30); answer = bool((tensor_big4 == 7).all())")
    one.start(LOOP)
    time.sleep(0.5)
    other.start(LOOP)
    assert third.answer() is True
    assert third.run("saver.pause()") is None
    assert one.answer() is True and other.answer() is True
    assert is_whole(one, "give4a") and is_whole(other, "give4b")
    third.close()


# --- files ---


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "nonsense",
        '{"version": 0}',
        '{"version": 1, "name": "NAME", "what": "exec", "tags": [], "asker": "x"}',
        '{"version": 1, "name": "NAME", "what": "pause", "tags": "weights", "asker": "x"}',
        '{"version": 1, "name": "NAME", "what": "pause", "tags": [7], "asker": "x"}',
        '{"version": 1, "name": "NAME", "what": "pause", "tags": [], "asker": "x", "until": "late", "wanted_bytes": 0}',
        '{"version": 1, "name": "another", "what": "pause", "tags": [], "asker": "x"}',
    ],
)
def test_what_is_no_request_is_not_done(two, place, text):
    one, _ = two
    hold(one, "weights", 12)
    name = f"{entry_of(place, one)}.{0:020d}-00000000"
    (place.place / f"{name}.ask").write_text(text.replace("NAME", name))
    place.send(folder.ASKED, [entry_of(place, one)])
    arrived(one)
    assert safe_point(one)["done"] == [] and not paused(one)
    assert not requests.are_there(place, entry_of(place, one))
    asked = requests.Request("", [], "", name=name)
    assert "different versions" in requests.take_answer(place, asked).problem


def test_a_link_is_no_request(two, place, tmp_path):
    one, _ = two
    name = f"{entry_of(place, one)}.{0:020d}-00000000"
    target = tmp_path / "target"
    target.write_text("{}")
    (place.place / f"{name}.ask").symlink_to(target)
    time.sleep(1.2)
    assert safe_point(one)["done"] == []
    (place.place / f"{name}.ask").unlink()


def test_an_answer_of_another_version_is_said_to_be_one(place, two):
    one, _ = two
    request = ask(place, one, "trim")
    served(one)
    answer_of(place, request)
    (place.place / f"{request.name}.answer").write_text('{"version": 9}')
    assert "different versions" in answer_of(place, request).problem


def test_requests_die_with_their_process(variables, place):
    one = Companion(**variables).wait_until_ready()
    hold(one, "weights", 12)
    request = ask(place, one, "pause")
    one.kill()
    assert one.pid not in [entry.pid for entry in place.entries()]
    assert not requests.is_known(place, request) and not list(place.place.glob(f"{one.pid}-*"))
    one.close()
