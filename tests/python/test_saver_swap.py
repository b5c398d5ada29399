"""saver.swap: some tags leave while others come back."""

import threading

import pytest

torch = pytest.importorskip("torch")

from ebbtide import _core  # noqa: E402
from ebbtide.errors import OutOfMemoryError, StateError, StoreError  # noqa: E402
from random_memory import random_bytes  # noqa: E402

MIB = 1 << 20


def noise(saver, tag, *sizes_mib, **options):
    with saver.region(tag, **options):
        return [random_bytes(mib * MIB, saver.device) for mib in sizes_mib]


def copies(tensors):
    return [tensor.cpu().clone() for tensor in tensors]


def assert_same(tensors, want):
    assert all(torch.equal(tensor.cpu(), other) for tensor, other in zip(tensors, want, strict=True))


@pytest.mark.parametrize(
    ("left", "right", "retain"),
    [
        ((12,), (12,), False),
        ((12, 12), (12,), True),
        ((12,), (12, 12, 20), False),
        ((30,), (12, 12), True),
        ((12,) * 3, (34,), False),
        ((12, 2, 16), (14, 16), True),
    ],
    ids=str,
)
def test_invariant_2_in_all_sizes_there_and_back(saver, tag, tag2, left, right, retain):
    first, second = noise(saver, tag, *left, retain=retain), noise(saver, tag2, *right, retain=retain)
    want = copies(first), copies(second)
    sizes = saver.tags()[tag].size_bytes, saver.tags()[tag2].size_bytes
    saver.pause(tag2)
    assert_same(first, want[0])
    for _ in range(2):
        done = saver.swap(pause=tag, resume=tag2)
        assert (done.paused.kind, done.paused.bytes, done.paused.by_tag) == ("pause", sizes[0], {tag: sizes[0]})
        assert (done.resumed.kind, done.resumed.bytes, done.resumed.by_tag) == ("resume", sizes[1], {tag2: sizes[1]})
        assert saver.is_paused(tag) and not saver.is_paused(tag2)
        assert_same(second, want[1])
        done = saver.swap(pause=[tag2], resume=(tag,))
        assert done.seconds > 0
        assert_same(first, want[0])
    saver.resume(tag2)
    assert_same(first + second, want[0] + want[1])
    assert [event.kind for event in saver.timeline if event.tags in (f"{tag}, {tag2}", f"{tag2}, {tag}")] == [
        "swap"
    ] * 4


def test_several_tags_on_each_side(saver, tag):
    names = [f"{tag}-{number}" for number in range(4)]
    tensors = {name: noise(saver, name, 12 + number) for number, name in enumerate(names)}
    want = {name: copies(group) for name, group in tensors.items()}
    saver.pause(*names[2:])
    done = saver.swap(pause=names[:2], resume=names[2:])
    assert set(done.paused.by_tag) == set(names[:2])
    assert set(done.resumed.by_tag) == set(names[2:])
    for name in names[2:]:
        assert_same(tensors[name], want[name])
    saver.resume()
    for name in names:
        assert_same(tensors[name], want[name])


def test_with_a_tag_that_is_empty_and_one_that_is_there_already(saver, tag, tag2):
    keep = noise(saver, tag, 12)
    want = copies(keep)
    with saver.region(tag2):
        pass
    done = saver.swap(pause=tag, resume=tag2)
    assert (done.paused.bytes, done.resumed.bytes) == (12 * MIB, 0)
    done = saver.swap(pause=tag2, resume=tag)
    assert (done.paused.bytes, done.resumed.bytes) == (0, 12 * MIB)
    assert saver.swap(pause=tag2, resume=tag).resumed.bytes == 0
    assert_same(keep, want)


@pytest.mark.parametrize("leaving_backup", ["ram", "pinned", "disk", None])
def test_invariant_2_no_old_bytes_where_there_was_no_backup(saver, tag, tag2, leaving_backup):
    secret, bare = noise(saver, tag, 16, 12, backup=leaving_backup), noise(saver, tag2, 16, 12, backup=None)
    want = copies(secret)
    saver.pause(tag2)
    saver.swap(pause=tag, resume=tag2)
    assert all(int(torch.count_nonzero(tensor)) == 0 for tensor in bare)
    for tensor in bare:
        tensor.fill_(7)
    saver.swap(pause=tag2, resume=tag)
    if leaving_backup is None:
        want = [torch.zeros_like(tensor) for tensor in want]
    assert_same(secret, want)
    saver.resume(tag2)
    assert all(int(torch.count_nonzero(tensor)) == 0 for tensor in bare)


def test_backup_and_retain_for_this_once(saver, tag, tag2):
    first, second = noise(saver, tag, 12), noise(saver, tag2, 12)
    want = copies(second)
    saver.pause(tag2)
    saver.swap(pause=tag, resume=tag2, backup=None, retain=True)
    assert saver.tags()[tag].dropped_bytes == 12 * MIB
    assert saver.tags()[tag2].retained_bytes == 12 * MIB
    saver.swap(pause=tag2, resume=tag)
    assert int(torch.count_nonzero(first[0])) == 0
    saver.resume(tag2)
    assert_same(second, want)


def test_a_backup_for_each_tag_that_leaves(saver, tag, tag2):
    first, second, third = noise(saver, tag, 12), noise(saver, tag2, 12), noise(saver, f"{tag}-third", 12)
    want = copies(second), copies(third)
    saver.pause(tag2)
    done = saver.swap(pause={tag: None, f"{tag}-third": "disk"}, resume=tag2)
    assert done.paused.by_tag == {tag: 12 * MIB, f"{tag}-third": 12 * MIB}
    assert_same(second, want[0])
    saver.swap(pause={tag2: None}, resume=[tag, f"{tag}-third"])
    assert int(torch.count_nonzero(first[0])) == 0
    assert_same(third, want[1])
    del second


def test_unused_bytes_are_not_copied(saver, tag, tag2):
    keep, other = noise(saver, tag, 12, 32), noise(saver, tag2, 12)
    want = copies(keep[:1])
    del keep[1]
    saver.pause(tag2)
    done = saver.swap(pause=tag, resume=tag2)
    assert (done.paused.unused, done.paused.copied) == (32 * MIB, 12 * MIB)
    assert "32.0 MiB unused" in str(done) and str(done).startswith("swap in")
    saver.resume(tag)
    assert_same(keep, want)
    assert other


@pytest.mark.parametrize("step", ["release_dead", "unused"])
@pytest.mark.parametrize("backup", ["ram", None])
def test_what_is_made_while_a_swap_looks_at_torch_is_kept(saver, tag, tag2, monkeypatch, backup, step):
    """Another thread takes a block that torch called free, at any moment between the look and the swap."""
    from ebbtide.saver.reclaim.look import Look

    keep, other = noise(saver, tag, 12, 32), noise(saver, tag2, 12, backup=backup)
    del keep[1]
    saver.pause(tag2)
    ask = getattr(Look, step)
    made = []

    def enter_afterwards(*arguments):
        found = ask(*arguments)
        made.extend(noise(saver, tag, 32))
        return found

    monkeypatch.setattr(Look, step, enter_afterwards)
    saver.swap(pause=tag, resume=tag2)
    monkeypatch.undo()
    saver.resume(tag)
    assert all(int(torch.count_nonzero(each)) > 0 for each in made)
    assert made and other and keep


def test_a_swap_that_does_not_fit_leaves_both_as_they_were(saver, tag, tag2):
    saver.trim()  # what other tests have cached would make room
    first, second = noise(saver, tag, 16), noise(saver, tag2, 16, 32)
    want = copies(first), copies(second)
    saver.pause(tag2)
    held = _core.query_device(0).held_bytes
    saver.configure(device_limit=held + 16 * MIB)
    with pytest.raises(OutOfMemoryError):
        saver.swap(pause=tag, resume=tag2)
    saver.configure(device_limit=None)
    assert (saver.tags()[tag].state, saver.tags()[tag2].state) == ("resident", "paused")
    assert _core.query_device(0).held_bytes == held
    assert_same(first, want[0])
    saver.configure(host_limit=saver.stats()["host_held_bytes"] + MIB)
    with pytest.raises(StoreError):
        saver.swap(pause=tag, resume=tag2)
    saver.configure(host_limit=None)
    assert (saver.tags()[tag].state, saver.tags()[tag2].state) == ("resident", "paused")
    assert_same(first, want[0])
    saver.swap(pause=tag, resume=tag2)
    saver.resume(tag)
    assert_same(first + second, want[0] + want[1])


def test_it_fits_where_a_resume_beside_would_not(saver, tag, tag2):
    saver.trim()  # what other tests have cached would make room
    first, second = noise(saver, tag, 24), noise(saver, tag2, 24)
    want = copies(first), copies(second)
    saver.pause(tag2)
    saver.configure(device_limit=_core.query_device(0).held_bytes)
    with pytest.raises(OutOfMemoryError):
        saver.resume(tag2)
    for _ in range(2):
        saver.swap(pause=tag, resume=tag2)
        assert_same(second, want[1])
        saver.swap(pause=tag2, resume=tag)
        assert_same(first, want[0])


def test_what_is_refused(saver, tag, tag2):
    keep = noise(saver, tag, 12), noise(saver, tag2, 12)
    saver.pause(tag2)
    with pytest.raises(ValueError, match="one side"):
        saver.swap(pause=tag, resume=[tag2, tag])
    for bad in ([], ()):
        with pytest.raises(ValueError, match="names no tag"):
            saver.swap(pause=bad, resume=tag2)
        with pytest.raises(ValueError, match="names no tag"):
            saver.swap(pause=tag, resume=bad)
    for bad in (None, 1, [1], [[tag]], b"x"):
        with pytest.raises(TypeError):
            saver.swap(pause=bad, resume=tag2)
    with pytest.raises(ValueError, match="reserved"):
        saver.swap(pause=tag, resume="a/b")
    with pytest.raises(ValueError, match="backup must be"):
        saver.swap(pause=tag, resume=tag2, backup="tape")
    with pytest.raises(StateError, match="no region was ever named"):
        saver.swap(pause=tag, resume=f"{tag}-unknown")
    with saver.region(tag), pytest.raises(StateError, match="thread"):
        saver.swap(pause=tag, resume=tag2)
    with pytest.raises(TypeError):
        saver.swap(tag, tag2)
    assert (saver.tags()[tag].state, saver.tags()[tag2].state) == ("resident", "paused")
    done = saver.swap(pause=[tag, f"{tag}-unknown"], resume=tag2, missing_ok=True)
    assert done.paused.bytes == done.resumed.bytes == 12 * MIB
    del keep


def test_two_swaps_and_two_pauses_at_once(saver, tag):
    names = [f"{tag}-{letter}" for letter in "abcd"]
    tensors = {name: noise(saver, name, 12, 6) for name in names}
    want = {name: copies(group) for name, group in tensors.items()}
    saver.pause(names[1])
    errors = []

    def repeat(act, back):
        try:
            for _ in range(5):
                act()
                back()
        except BaseException as error:
            errors.append(error)

    swap = lambda out, back: lambda: saver.swap(pause=out, resume=back)  # noqa: E731
    threads = [
        threading.Thread(target=repeat, args=(swap(names[0], names[1]), swap(names[1], names[0]))),
        threading.Thread(target=repeat, args=(lambda: saver.pause(names[2]), lambda: saver.resume(names[2]))),
        threading.Thread(target=repeat, args=(lambda: saver.pause(names[3]), lambda: saver.resume(names[3]))),
        threading.Thread(
            target=repeat, args=(lambda: saver.pause(names[2], names[3]), lambda: saver.resume(names[3], names[2]))
        ),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert errors == []
    saver.resume()
    for name in names:
        assert_same(tensors[name], want[name])


def test_an_open_region_of_the_returning_tag_leaves_the_other_side_its_free_blocks(saver, tag, tag2):
    kept, freed = noise(saver, tag, 12, 12)
    noise_of_second = noise(saver, tag2, 12)
    saver.pause(tag2)
    del freed
    with saver.region(tag2):
        done = saver.swap(pause=tag, resume=tag2)
    assert done.paused.copied == 12 * MIB and done.paused.unused == 12 * MIB
    saver.resume(tag)
    assert len(kept) == len(noise_of_second[0]) == 12 * MIB
