"""`saver.keep`: memory that stays on the device; and the hooks of "remapped", which tell what did not."""

import gc

import pytest

torch = pytest.importorskip("torch")

from ebbtide import _core  # noqa: E402
from ebbtide.errors import StateError  # noqa: E402
from ebbtide.saver.sharing import share  # noqa: E402

MIB = 1 << 20


def make(saver, tag, mib=24, **options):
    """Of a segment of its own."""
    with saver.region(tag, **options):
        return torch.full((mib * MIB,), 3, dtype=torch.uint8, device=saver.device)


def test_a_pause_passes_it_by(saver, tag):
    kept, other = make(saver, tag), make(saver, tag)
    address, want = kept.data_ptr(), kept.cpu().clone()
    let_go = saver.keep(kept)
    report = saver.pause(tag)
    assert report.bytes == 24 * MIB
    assert [(each.tag, each.bytes) for each in report.remaining if each.tag == tag] == [(tag, 24 * MIB)]
    status = saver.tags()[tag]
    assert (status.state, status.resident_bytes, status.kept_bytes) == ("paused", 24 * MIB, 24 * MIB)
    assert "kept" in str(saver.tags())
    kept += 1
    assert torch.equal(kept.cpu(), want + 1) and kept.data_ptr() == address
    assert saver.pause(tag).bytes == 0
    assert saver.resume(tag).bytes == 24 * MIB
    assert saver.tags()[tag].state == "resident" and int(other[0]) == 3
    let_go()
    assert saver.tags()[tag].kept_bytes == 0
    assert saver.pause(tag).bytes == 48 * MIB
    saver.resume(tag)
    assert torch.equal(kept.cpu(), want + 1)


def test_it_is_counted(saver, tag):
    kept = make(saver, tag)
    first, second = saver.keep(kept), saver.keep(kept[1:])
    first()
    first()
    assert saver.pause(tag).bytes == 0
    second()
    assert saver.pause(tag).bytes == 24 * MIB


@pytest.mark.parametrize("backup", ["ram", "pinned", "disk", None])
def test_every_operation_passes_it_by(saver, tag, tag2, backup):
    kept, other = make(saver, tag, backup=backup), make(saver, tag2)
    let_go = saver.keep(kept)
    saver.prepare(tag)
    assert saver.demote(tag).bytes == 0
    saver.pause(tag2)
    swapped = saver.swap(pause=tag, resume=tag2)
    assert (swapped.paused.bytes, swapped.resumed.bytes) == (0, 24 * MIB)
    with saver.paused(tag):
        assert int(kept[0]) == 3
    saver.trim(tag)
    assert int(kept[0]) == 3 and int(other[0]) == 3
    let_go()


def test_what_is_not_here_can_not_be_kept(saver, tag):
    with pytest.raises(StateError, match="no memory in a region"):
        saver.keep(torch.ones(3, device=saver.device))
    with pytest.raises(TypeError, match="keep takes a plain strided tensor"):
        saver.keep("weights")
    tensor = make(saver, tag)
    saver.pause(tag)
    with pytest.raises(StateError, match=f"memory of tag '{tag}' is not on the device: resume or promote"):
        saver.keep(tensor)
    saver.resume(tag)
    saver.demote(tag)
    with pytest.raises(StateError, match="resume or promote"):
        saver.keep(tensor)
    saver.promote(tag)
    saver.keep(tensor)()


def test_it_is_parted_from_the_neighbours_with_which_it_came_back(saver, tag):
    tensors = [make(saver, tag, mib) for mib in (10, 12, 14, 16)]
    saver.pause(tag)
    saver.resume(tag)  # behind one handle
    let_go = saver.keep(tensors[1])
    assert saver.pause(tag).bytes == (10 + 14 + 16) * MIB
    assert int(tensors[1][0]) == 3
    saver.resume(tag)
    assert all(int(each.min()) == int(each.max()) == 3 for each in tensors)
    let_go()


@pytest.mark.sim_only
def test_where_there_is_no_room_to_part_it_nothing_is_kept(saver, tag):
    tensors = [make(saver, tag, mib) for mib in (10, 12, 14, 16)]
    saver.pause(tag)
    saver.resume(tag)
    saver.configure(device_limit=_core.query_device(0).held_bytes, reserve=0)
    with pytest.raises(StateError, match="no room on the device to give this memory a handle of its own"):
        saver.keep(tensors[1])
    saver.configure(device_limit=None, reserve=None)
    assert saver.tags()[tag].kept_bytes == 0
    assert saver.pause(tag).bytes == 52 * MIB


def test_it_lives_until_it_is_let_go(saver, tag):
    tensor = make(saver, tag)
    let_go = saver.keep(tensor)
    address = tensor.data_ptr()
    del tensor
    gc.collect()
    saver.trim(tag)
    assert _core.find(address).is_kept
    let_go()
    gc.collect()
    saver.trim(tag)
    assert _core.find(address) is None or not _core.find(address).is_kept


def test_it_lives_also_where_nobody_can_end_it(saver, tag):
    tensor = make(saver, tag)
    address = tensor.data_ptr()
    saver.keep(tensor)
    del tensor
    gc.collect()
    again = make(saver, tag)
    assert again.data_ptr() != address
    for number in list(share._kept):
        share._let_go(number)


def test_it_can_not_be_adopted_into_another_tag(saver, tag, tag2):
    tensor = make(saver, tag)
    let_go = saver.keep(tensor)
    with pytest.raises(StateError, match=f"saver.keep keeps the memory of a tensor to adopt, in tag '{tag}'"):
        saver.adopt(tensor, tag=tag2)
    assert _core.find(tensor.data_ptr()).tag == tag
    let_go()


def test_hooks_run_as_without_it(saver, tag):
    kept, other = make(saver, tag), make(saver, tag)
    log = []
    removers = [
        saver.on(event, tag, lambda _, event=event: log.append(event))
        for event in ("before_pause", "after_pause", "before_resume", "after_resume")
    ]
    let_go = saver.keep(kept)
    saver.pause(tag)
    saver.pause(tag)
    saver.resume(tag)
    assert log == ["before_pause", "after_pause", "before_resume", "after_resume"]
    let_go()
    for remove in removers:
        remove()
    assert int(other[0]) == 3


# --- what is remapped ---


@pytest.fixture
def told(saver, tag):
    """The ranges that were told of the tag, call by call."""
    calls = []
    remove = saver.on("remapped", tag, lambda name, ranges: calls.append((name, sorted(ranges))))
    yield calls
    remove()


def range_of(tensor):
    info = _core.find(tensor.data_ptr())
    return info.address, info.size_bytes


def test_a_resume_tells_what_is_new(saver, tag, told):
    kept, other = make(saver, tag), make(saver, tag)
    let_go = saver.keep(kept)
    saver.pause(tag)
    assert told == []
    saver.resume(tag)
    assert told == [(tag, [range_of(other)])]
    saver.resume(tag)
    assert len(told) == 1
    let_go()
    saver.pause(tag)
    saver.resume(tag, wait=False).wait()
    assert told[1] == (tag, sorted([range_of(kept), range_of(other)]))


def test_so_do_a_swap_a_demotion_and_a_promotion(saver, tag, tag2, told):
    tensor, _other = make(saver, tag), make(saver, tag2)
    saver.pause(tag)
    saver.swap(pause=tag2, resume=tag)
    saver.demote(tag)
    saver.promote(tag)
    saver.promote(tag)
    assert told == [(tag, [range_of(tensor)])] * 3
    saver.resume()


def test_a_resume_that_fails_tells_what_has_come(saver, tag, told):
    tensor = make(saver, tag)
    saver.pause(tag)
    saver.configure(device_limit=_core.query_device(0).held_bytes)
    with pytest.raises(torch.OutOfMemoryError):
        saver.resume(tag)
    saver.configure(device_limit=None)
    assert told == []
    saver.resume(tag)
    assert told == [(tag, [range_of(tensor)])]


@pytest.mark.parametrize("waits", [True, False])
def test_an_exception_of_a_hook_is_the_callers_and_the_rest_goes_on(saver, tag, waits):
    tensor = make(saver, tag)
    log = []
    removers = [saver.on("after_resume", tag, log.append)]

    def fail(_tag, _ranges):
        raise KeyError("planted")

    remove = saver.on("remapped", "*", fail)
    saver.pause(tag)
    if waits:
        with pytest.raises(KeyError, match="planted"):
            saver.resume(tag)
    else:  # the caller needs the Pending
        with pytest.warns(RuntimeWarning, match="remapped hook failed: .*planted"):
            saver.resume(tag, wait=False).wait()
    for each in (*removers, remove):
        each()
    assert log == [tag]
    assert saver.tags()[tag].state == "resident" and int(tensor[0]) == 3
