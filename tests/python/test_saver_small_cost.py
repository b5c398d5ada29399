"""What an ordinary pause and resume of one tag leave out: the fixed cost that a small tag pays each time."""

import sys

import pytest

torch = pytest.importorskip("torch")

from ebbtide import _core  # noqa: E402
from ebbtide.saver.pools import region_pools  # noqa: E402
from ebbtide.saver.reclaim.look import Look  # noqa: E402
from random_memory import random_bytes  # noqa: E402

MIB = 1 << 20
MOST_CALLS = 85  # of functions of Python: there were 119 and 129, each with cold caches at about half a microsecond


def noise(saver, tag, mib):
    with saver.region(tag):
        return random_bytes(mib * MIB, saver.device)


def count_calls(operate):
    calls = []

    def note(frame, event, _):
        if event == "call":
            calls.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        operate()
    finally:
        sys.setprofile(None)
    return len(calls)


def test_a_pause_and_a_resume_make_few_calls(saver, tag):
    keep = noise(saver, tag, 2)
    for _ in range(2):
        saver.pause(tag)
        saver.resume(tag)
    assert count_calls(lambda: saver.pause(tag)) <= MOST_CALLS
    assert count_calls(lambda: saver.resume(tag)) <= MOST_CALLS
    assert len(keep) == 2 * MIB


def test_a_report_makes_only_what_is_looked_at(saver, tag):
    keep = noise(saver, tag, 2)
    report = saver.pause(tag)
    fields = ("by_tag", "by_device", "rows", "remaining")
    assert all(isinstance(report.__dict__[name], _core.Report) for name in fields)
    assert report.by_tag == {tag: report.bytes}
    assert not isinstance(report.__dict__["by_tag"], _core.Report)
    assert report.by_tag is report.by_tag
    assert report.by_device == {0: report.bytes}
    again = saver.resume(tag)
    assert (again.kind, again.bytes, again.note, again.by_tag) == ("resume", report.bytes, "", {tag: report.bytes})
    assert saver.Report("pause").by_tag == {}
    assert saver.Report("pause").by_tag is not saver.Report("pause").by_tag
    assert len(keep) == 2 * MIB


def test_no_pool_is_withheld_where_nothing_died(saver, tag, monkeypatch):
    withheld = []
    withhold = region_pools.RegionPools.withheld

    def note(self, tags):
        withheld.append(list(tags))
        return withhold(self, tags)

    monkeypatch.setattr(region_pools.RegionPools, "withheld", note)
    keep, gone = noise(saver, tag, 12), noise(saver, tag, 32)
    saver.pause(tag)
    saver.resume(tag)
    assert withheld == []
    saver.pause(tag)
    del gone
    assert saver.resume(tag).bytes == 12 * MIB
    assert withheld == [[tag]]
    assert len(keep) == 12 * MIB


def test_what_is_made_before_the_pools_are_withheld_is_kept(saver, tag, monkeypatch):
    """All of a pool is dead at the first look. Then a thread enters it again, before nobody may."""
    gone = noise(saver, tag, 12)
    saver.pause(tag)
    del gone
    find, made, looks = Look._dead, [], []

    def find_and_enter(*arguments):
        found = list(find(*arguments))
        looks.append(len(found))
        if len(looks) == 1:  # entering looks, too
            made.append(noise(saver, tag, 12))
            saver.pause(tag)
        return found

    monkeypatch.setattr(Look, "_dead", find_and_enter)
    saver.resume(tag)
    monkeypatch.undo()
    assert int(torch.count_nonzero(made[0])) > 0
