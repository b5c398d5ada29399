"""A thread's own allocations in a preloaded program, besides ebbtide's pools: regions set their policy."""

import threading

import pytest

torch = pytest.importorskip("torch")

from ebbtide import _core  # noqa: E402
from ebbtide.saver.pools import ordinary_memory  # noqa: E402
from ebbtide.saver.regions import entry  # noqa: E402

UNSET = (_core.TAGGING_UNSET, "", 1)


def tagged(tag, backup=1):
    return (_core.TAGGING_ON, tag, backup)


def test_a_region_gives_its_tag_to_its_thread_alone(saver, tag, tag2):
    seen = []
    with saver.region(tag, backup="pinned"):
        assert _core.thread_policy() == tagged(tag, 2)
        thread = threading.Thread(target=lambda: seen.append(_core.thread_policy()))
        thread.start()
        thread.join(30)
        with saver.region(tag2, backup=None):
            assert _core.thread_policy() == tagged(tag2, 0)
        assert _core.thread_policy() == tagged(tag, 2)
    assert seen == [UNSET]
    assert _core.thread_policy() == UNSET


def test_disabled_is_off_and_keeps_the_tag_for_regions_inside(saver, tag, tag2):
    with saver.disabled():
        assert _core.thread_policy() == (_core.TAGGING_OFF, "", 1)
    with saver.region(tag), saver.disabled():
        assert _core.thread_policy() == (_core.TAGGING_OFF, tag, 1)
        with saver.region(tag2):
            assert _core.thread_policy() == tagged(tag2)
        assert _core.thread_policy()[0] == _core.TAGGING_OFF
    assert _core.thread_policy() == UNSET


def test_memory_of_a_graph_has_the_tag_of_the_region_around_its_capture(saver, tag):
    """A capture gets ordinary memory, which belongs to the graph."""
    with saver.region(tag), ordinary_memory.OrdinaryMemory():
        assert _core.thread_policy() == tagged(tag)
    with ordinary_memory.OrdinaryMemory():
        assert _core.thread_policy() == UNSET


def test_a_region_that_cannot_be_entered_changes_nothing(saver, tag, tag2, monkeypatch):
    with saver.region(tag):
        monkeypatch.setattr(entry, "restore_trimmed", lambda *_: 1 / 0)  # after the lease and the tag
        with pytest.raises(ZeroDivisionError), saver.region(tag2):
            pass
        assert _core.thread_policy() == tagged(tag)
    assert _core.thread_policy() == UNSET


def test_generators_may_leave_in_any_order(saver, tag, tag2):
    def stay(name):
        with saver.region(name):
            yield

    outer, inner = stay(tag), stay(tag2)
    next(outer)
    next(inner)
    outer.close()
    assert _core.thread_policy() == tagged(tag2)
    inner.close()
    assert _core.thread_policy() == UNSET


def test_a_region_that_another_thread_ends_counts_no_more(saver, tag):
    def stay():
        with saver.region(tag):
            yield

    inside = stay()
    next(inside)
    assert _core.thread_policy() == tagged(tag)
    thread = threading.Thread(target=inside.close)
    thread.start()
    thread.join(30)
    assert _core.thread_policy() == UNSET


def test_tags_of_other_programs_become_tags_and_come_back():
    for text in ("", "*", "a/b", " x ", "50%", "\u200b", "ä" * 300, "kv_cache"):
        encoded = _core.encode_tag(text)
        _core.check_tag(encoded.encode())
        assert _core.decode_tag(encoded) == text.encode()
    assert _core.encode_tag(b"\xff") == "%FF"
    assert _core.decode_tag("%FF") == b"\xff"
    with pytest.raises(TypeError):  # no UTF-8
        _core.encode_tag("\ud800")
