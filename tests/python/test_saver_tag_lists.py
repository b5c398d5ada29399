"""Calls that take tags take them one by one or as a list, in one operation."""

import pytest

torch = pytest.importorskip("torch")

from ebbtide.errors import StateError, StoreError  # noqa: E402
from random_memory import random_bytes  # noqa: E402

MIB = 1 << 20

SEVERAL = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "keys": lambda tags: dict.fromkeys(tags).keys(),
    "generator": lambda tags: (tag for tag in tags),
}


@pytest.fixture
def both(saver, tag, tag2):
    made = []
    for name in (tag, tag2):
        with saver.region(name):
            made.append(random_bytes(4 * MIB, saver.device))
    return made


@pytest.mark.parametrize("kind", SEVERAL)
def test_each_kind_of_list(saver, tag, tag2, both, kind):
    several = SEVERAL[kind]
    want = [tensor.cpu().clone() for tensor in both]
    paused = saver.pause(several([tag, tag2]))
    assert set(paused.by_tag) == {tag, tag2}
    assert len([event for event in saver.timeline[-1:] if event.kind == "pause"]) == 1, "one operation"
    resumed = saver.resume(several([tag, tag2]))
    assert set(resumed.by_tag) == {tag, tag2}
    for tensor, expected in zip(both, want, strict=True):
        assert torch.equal(tensor.cpu(), expected)


def test_every_function_that_takes_tags(saver, tag, tag2, both):
    names = [tag, tag2]
    with saver.paused(names) as report:
        assert set(report.by_tag) == set(names)
    saver.trim(names)
    assert set(saver.prepare(names).by_tag) == set(names)
    assert set(saver.prepare(names, copy=True).by_tag) == set(names)
    saver.promote(names)
    assert saver.demote(names, max_bytes=0).bytes == 0
    saver.pause(names)
    assert saver.resume(names, wait=False).wait().bytes > 0
    saver.pause(tag)
    swapped = saver.swap(pause={tag2}, resume=(name for name in [tag]))
    assert (list(swapped.paused.by_tag), list(swapped.resumed.by_tag)) == ([tag2], [tag])
    saver.resume(names)


def test_mixed_and_repeated(saver, tag, tag2, both):
    assert set(saver.pause(tag, [tag, tag2], (tag2,)).by_tag) == {tag, tag2}
    saver.resume([tag, tag], tag2)
    assert not saver.is_paused(tag) and not saver.is_paused(tag2)


@pytest.mark.parametrize("function", ["pause", "resume", "prepare", "trim", "promote", "demote"])
def test_what_is_refused(saver, tag, both, function):
    call = getattr(saver, function)
    for empty in ([], (), set(), {}.keys(), iter([])):
        with pytest.raises(ValueError, match="names no tag"):
            call(empty)
        with pytest.raises(ValueError, match="names no tag"):
            call(tag, empty)
    for bad in ([[tag]], [None], [b"x"], b"x", torch.ones(2), torch.nn.Sequential()):
        with pytest.raises(TypeError, match="a tag is a str"):
            call(bad)
    with pytest.raises(ValueError, match="reserved"):
        call([tag, "a/b"])
    with pytest.raises(StateError, match="no region was ever named"):
        call([tag, f"{tag}-unknown"])
    assert not saver.is_paused(tag), "nothing moved"
    call([tag, f"{tag}-unknown"], missing_ok=True)
    saver.resume(tag)


def test_a_list_is_one_operation(saver, tag, tag2, both):
    saver.pause([tag, tag2])
    saver.resume([tag, tag2])
    saver.configure(host_limit=saver.stats()["host_held_bytes"] + 5 * MIB)
    with pytest.raises(StoreError):
        saver.pause([tag, tag2])
    assert not saver.is_paused(tag) and not saver.is_paused(tag2)


def test_a_list_is_no_dict(saver, tag, tag2, both):
    with pytest.raises(TypeError, match="one dict"):
        saver.pause({tag: "ram"}, [tag2])
    saver.pause({tag: "ram"})
    saver.resume([tag])


@pytest.mark.parametrize("name", ["pause", "resume", "prepare", "trim", "promote", "demote", "paused", "swap"])
def test_missing_ok_is_a_bool(saver, tag, tag2, name):
    from contextlib import ExitStack

    with ExitStack() as stack, pytest.raises(TypeError, match="missing_ok is True or False, not 'x'"):
        if name == "swap":
            saver.swap(pause=tag, resume=tag2, missing_ok="x")
        done = getattr(saver, name)(["nope"], missing_ok="x")
        if name == "paused":
            stack.enter_context(done)


def test_a_generator_serves_every_entry_of_paused(saver, tag, tag2):
    kept = []
    for name in (tag, tag2):
        with saver.region(name):
            kept.append(torch.ones(MIB, device=saver.device))

    @saver.paused(name for name in (tag, tag2))
    def are_away():
        return [saver.is_paused(name) for name in (tag, tag2)]

    assert are_away() == are_away() == [True, True]
    block = saver.paused(iter([tag]))
    assert repr(block) == f"saver.paused({tag!r})"
    with block:
        assert saver.is_paused(tag) and not saver.is_paused(tag2)
    assert len(kept) == 2
