"""Pauseable programs without a GPU: further tags in torch's default pool, and torch before 2.11."""

import threading

import pytest

torch = pytest.importorskip("torch")

from ebbtide import _core  # noqa: E402
from ebbtide.saver.pools import bypass  # noqa: E402
from pauseable_model import DEFAULT, MIB, routes_of_threads  # noqa: E402

# The model of torch's cache reads and writes device memory as the CPU does.
pytestmark = pytest.mark.sim_only


def test_a_thread_s_own_tag_in_torch_s_pool_has_the_bypass_too(mine, saver, tag2, monkeypatch):
    """Two tags share torch's default pool. Its pool stays closed until both are back."""
    monkeypatch.setattr(bypass, "_hooked_tags", lambda names: [tag2] if not names or tag2 in names else [])
    own = mine.make(2, 1)
    mine.model.tag = tag2
    theirs = mine.make(4, 2)
    mine.drop(mine.make(8, 3))
    mine.model.tag = mine.tag
    report = saver.pause(tag2)
    assert (report.bytes, report.unused) == (12 * MIB, 8 * MIB)
    inside = mine.model.route()
    assert inside == routes_of_threads(mine.model) not in (None, DEFAULT)
    mine.make(8, 4)  # the cache has a paused segment of this size
    saver.pause(mine.tag)
    assert mine.model.route() not in (None, inside)
    saver.resume(tag2)
    assert mine.model.route() is not None
    saver.resume(mine.tag)
    assert mine.model.route() is None
    assert (_core.find(own).tag, _core.find(theirs).tag) == (mine.tag, tag2)
    mine.check()


def test_a_thread_s_tag_outside_torch_s_pool_needs_no_bypass(mine, saver, tag2, monkeypatch):
    """A graph's pool, say, from which torch hands out nothing by itself."""
    monkeypatch.setattr(bypass, "_hooked_tags", lambda names: [tag2])
    mine.model.tag = tag2
    in_graph = mine.model.malloc(6)
    mine.model.tag = mine.tag
    mine.model.pool_of[in_graph] = (77, 0)
    assert saver.pause(tag2).bytes == 6 * MIB
    assert mine.model.route() is None
    saver.resume(tag2)
    mine.model.free_in[(77, 0)] = [in_graph]
    mine.model.use_counts[(77, 0)] = 0


def test_where_the_snapshot_is_not_understood_a_thread_s_tag_has_the_bypass(mine, saver, tag2, monkeypatch):
    monkeypatch.setattr(bypass, "_hooked_tags", lambda names: [tag2])
    mine.model.tag = tag2
    mine.make(2, 1)
    mine.model.tag = mine.tag
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [{"address": 0}])
    saver.pause(tag2)
    assert mine.model.route() is not None
    saver.resume(tag2)
    assert mine.model.route() is None


def test_old_torch_gets_no_pool_but_a_warning(mine, saver, monkeypatch):
    """As torch_memory_saver does it there: torch's cache goes back, and the rest leaves."""
    monkeypatch.setattr(torch, "__version__", "2.10.1")
    monkeypatch.setattr(bypass, "_has_warned", False)
    mine.drop(mine.make(4, 1))
    kept = mine.make(2, 2)
    with pytest.warns(RuntimeWarning, match=r"torch 2\.10\.1.*allocate nothing") as said:
        assert saver.pause().by_tag[mine.tag] == 2 * MIB
        assert saver.resume(mine.tag).bytes == 2 * MIB
        assert saver.pause(mine.tag).bytes == 2 * MIB
    assert len(said) == 1
    assert mine.model.route() is None is routes_of_threads(mine.model)
    assert _core.find(kept).is_paused
    saver.resume(mine.tag)
    mine.check()


def test_old_torch_may_be_paused_while_another_thread_is_in_a_region(mine, saver, tag2, monkeypatch):
    """That thread keeps its own pool, since none is opened."""
    monkeypatch.setattr(torch, "__version__", "2.10.1")
    monkeypatch.setattr(bypass, "_has_warned", True)
    mine.make(2, 1)
    inside, leave = threading.Event(), threading.Event()

    def stay():
        with saver.region(tag2):
            inside.set()
            leave.wait(30)

    thread = threading.Thread(target=stay)
    thread.start()
    try:
        assert inside.wait(30)
        assert saver.pause(mine.tag).bytes == 2 * MIB
    finally:
        leave.set()
        thread.join(30)
