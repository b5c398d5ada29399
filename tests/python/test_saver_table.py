"""The table of tags after operations that gave memory another keeper, and flags that are no bools."""

import pytest

torch = pytest.importorskip("torch")

MIB = 1 << 20


def test_the_backup_of_what_was_dropped_is_none(saver, tag, tag2):
    kept = []
    for name, backup in ((tag, "ram"), (tag2, "pinned")):
        with saver.region(name, backup=backup):
            kept.append(torch.ones(3 * MIB, device=saver.device))
    table = saver.tags()
    assert (table[tag].backups, table[tag2].backups) == (("ram",), ("pinned",))
    saver.pause({tag: None, tag2: "disk"})
    table = saver.tags()
    assert (table[tag].backups, table[tag2].backups) == ((None,), ("disk",))
    saver.resume(tag, tag2)
    table = saver.tags()
    assert (table[tag].backups, table[tag2].backups) == (("ram",), ("pinned",)), "the backup from now on"


def test_flags_are_refused_before_anything_moves(saver, tag):
    with saver.region(tag):
        kept = torch.ones(3 * MIB, device=saver.device)
    called = []
    remove = saver.on("before_resume", tag, called.append)
    saver.pause(tag)
    for name in ("wait", "hold_stream", "missing_ok"):
        for value in (torch.ones(2), "no", float("nan"), 1, None):
            with pytest.raises(TypeError, match=f"{name} is True or False"):
                saver.resume(tag, **{name: value})
    for name in ("wait", "copy", "missing_ok"):
        with pytest.raises(TypeError, match=f"{name} is True or False"):
            saver.prepare(tag, **{name: "no"})
    for name in ("writable", "retained"):
        with pytest.raises(TypeError, match=f"{name} is True or False"):
            saver.backup_of(kept, **{name: 3.5})
    assert saver.is_paused(tag) and called == []
    saver.resume(tag)
    remove()
    assert called == [tag] and torch.equal(kept.cpu(), torch.ones(3 * MIB))
