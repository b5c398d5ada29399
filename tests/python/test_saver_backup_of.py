"""saver.backup_of: the stored bytes of a paused tensor as a tensor, without a copy."""

import ctypes
import gc

import pytest

torch = pytest.importorskip("torch")

from ebbtide import _core  # noqa: E402
from ebbtide.errors import StateError  # noqa: E402
from random_memory import random_bytes  # noqa: E402


def test_none_while_resident_and_without_bytes(saver, tag):
    with saver.region(tag):
        inside = torch.ones(10, device=saver.device)
    assert saver.backup_of(inside) is None
    assert saver.backup_of(inside, retained=True) is None
    assert saver.backup_of(torch.ones(3, device="meta")) is None
    assert saver.backup_of(torch.empty(0)) is None


def test_memory_of_others_is_named(saver):
    plain = torch.ones(10, 3, device=saver.device)
    for options in ({}, {"retained": True}, {"writable": True}):
        with pytest.raises(StateError, match=r"shape \(10, 3\).*not in memory of ebbtide.*saver.adopt"):
            saver.backup_of(plain, **options)


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.int64, torch.bool, torch.complex64],
)
def test_same_dtype_shape_strides_and_values(saver, tag, dtype):
    with saver.region(tag):
        base = torch.randint(0, 2, (7, 11, 13), device=saver.device).to(dtype)
    pieces = [
        base,
        base[2:5, ::3, 1],
        base.transpose(0, 2),
        base[3],
        base[0, 0, 0],
        base.expand(2, 7, 11, 13),
        base[1:1],
    ]
    want = [piece.cpu().clone() for piece in pieces]
    saver.pause(tag)
    for piece, expected in zip(pieces[:-1], want, strict=False):
        stored = saver.backup_of(piece)
        assert stored.device.type == "cpu"
        assert (stored.dtype, stored.shape, stored.stride()) == (piece.dtype, piece.shape, piece.stride())
        assert torch.equal(stored, expected)
    assert saver.backup_of(pieces[-1]) is None
    stored = saver.backup_of(base)
    address = stored.data_ptr()
    assert saver.backup_of(base).data_ptr() == address  # no copy
    saver.resume(tag)
    assert saver.backup_of(base) is None


def test_it_keeps_its_bytes_alive(saver, tag):
    with saver.region(tag):
        tensor = torch.arange(5_000_000, device=saver.device)
    saver.pause(tag)
    stored = saver.backup_of(tensor)[1000:]
    saver.resume(tag)
    tensor.zero_()
    saver.pause(tag)
    saver.resume(tag)
    del tensor
    gc.collect()
    assert int(stored[0]) == 1000
    assert int(stored[-1]) == 4_999_999


def test_dropped_content_is_named(saver, tag):
    with saver.region(tag, backup=None):
        tensor = torch.ones(1000, device=saver.device)
    saver.pause(tag)
    for options in ({}, {"retained": True}):
        with pytest.raises(StateError, match=f"dropped with its tag '{tag}'"):
            saver.backup_of(tensor, **options)
    saver.resume(tag)
    assert saver.backup_of(tensor) is None


def test_lazy_conjugates_and_negatives(saver, tag):
    with saver.region(tag):
        tensor = torch.randn(100, dtype=torch.complex64, device=saver.device)
    lazy = [tensor.conj(), tensor.conj().imag]
    want = [t.cpu().resolve_conj().resolve_neg().clone() for t in lazy]
    saver.pause(tag)
    for tensor_view, expected in zip(lazy, want, strict=True):
        assert torch.equal(saver.backup_of(tensor_view).resolve_conj().resolve_neg(), expected)


def test_parameters_and_what_needs_gradients(saver, tag):
    with saver.region(tag):
        parameter = torch.nn.Parameter(torch.full((10,), 3.0, device=saver.device))
    saver.pause(tag)
    stored = saver.backup_of(parameter)
    assert not stored.requires_grad
    assert stored.tolist() == [3.0] * 10


@pytest.mark.parametrize("thing", [None, 1, "tensor", [1]], ids=repr)
def test_only_tensors(saver, thing):
    with pytest.raises(TypeError, match="backup_of takes"):
        saver.backup_of(thing)


def test_no_sparse_tensors(saver):
    with pytest.raises(TypeError, match="sparse"):
        saver.backup_of(torch.eye(3).to_sparse())


def through_ops(view, new):
    view.copy_(new)


def through_an_alias_of_numpy(view, new):
    alias = view.numpy()
    alias[...] = new.numpy()


def through_a_child_that_outlives_it(view, new):
    child = view.view(-1)[:].t()
    del view
    gc.collect()
    child.copy_(new)


def through_its_storage(view, new):
    view.untyped_storage().copy_(new.clone().untyped_storage())


def through_dlpack(view, new):
    torch.from_dlpack(view).mul_(0).add_(new)


def through_its_address(view, new):
    ctypes.memmove(view.data_ptr(), new.data_ptr(), new.nbytes)


WAYS_TO_WRITE = [
    through_ops,
    through_an_alias_of_numpy,
    through_a_child_that_outlives_it,
    through_its_storage,
    through_dlpack,
    through_its_address,
]


@pytest.mark.parametrize("backup", ["ram", "pinned", "disk"])
@pytest.mark.parametrize("writable", [False, True])
@pytest.mark.parametrize("write", WAYS_TO_WRITE, ids=lambda way: way.__name__)
def test_a_write_is_noticed_whatever_the_way(saver, tag, backup, writable, write):
    elements = 3 * 2**20 // 4
    old, new = torch.rand(elements), torch.rand(elements)
    with saver.region(tag, backup=backup, retain=True):
        tensor = torch.empty(elements, device=saver.device)
    tensor.copy_(old)
    saver.pause(tag)
    saver.resume(tag)
    assert saver.pause(tag).copied == 0  # its digest is known
    write(saver.backup_of(tensor, writable=writable), new)
    gc.collect()
    saver.resume(tag)
    assert torch.equal(tensor.cpu(), new)  # as written through the view
    tensor.copy_(old)
    saver.pause(tag)
    saver.resume(tag)
    assert torch.equal(tensor.cpu(), old)


@pytest.mark.parametrize("writable", [False, True])
def test_the_cores_buffer_says_whether_it_may_be_written(saver, tag, writable):
    with saver.region(tag):
        tensor = torch.rand(1000, device=saver.device)
    saver.pause(tag)
    assert memoryview(_core.backup_of(tensor.data_ptr(), tensor.nbytes, writable)).readonly is not writable
    saver.resume(tag)


@pytest.mark.parametrize("backup", ["ram", "pinned", "disk"])
def test_a_write_into_blocks_of_one_value_is_noticed(saver, tag, backup):
    with saver.region(tag, backup=backup, retain=True):
        tensor = torch.zeros(4 * 2**20, dtype=torch.uint8, device=saver.device)
    saver.pause(tag)
    saver.backup_of(tensor)[7:9] = 3
    saver.resume(tag)
    assert tensor.cpu().nonzero().flatten().tolist() == [7, 8]
    tensor.zero_()
    saver.pause(tag)
    saver.resume(tag)
    assert not tensor.any()


def test_what_was_only_looked_at_comes_back_as_it_was(saver, tag):
    with saver.region(tag, retain=True):
        seen = random_bytes(4 * 2**20, saver.device)
        unseen = random_bytes(24 * 2**20, saver.device)
    want = seen.cpu().clone(), unseen.cpu().clone()
    for _ in range(2):
        saver.pause(tag)
        assert torch.equal(saver.backup_of(seen), want[0])
        saver.resume(tag)
        report = saver.pause(tag)
        assert report.clean >= 24 * 2**20  # only the blocks that a view showed are copied
        assert 0 < report.copied <= 6 * 2**20
        saver.resume(tag)
    assert torch.equal(seen.cpu(), want[0])
    assert torch.equal(unseen.cpu(), want[1])


def test_a_view_that_is_held_across_pauses_neither_changes_nor_is_believed(saver, tag):
    with saver.region(tag, retain=True):
        tensor = torch.full((2**20,), 1.0, device=saver.device)
    tensor.uniform_()
    first = tensor.cpu().clone()
    saver.pause(tag)
    view = saver.backup_of(tensor)
    for _ in range(3):
        saver.resume(tag)
        assert torch.equal(tensor.cpu(), first)
        saver.pause(tag)
        view.fill_(9.0)  # the view of the first pause, which belongs to no backup any more
        assert torch.equal(saver.backup_of(tensor), first)
    saver.resume(tag)
    assert torch.equal(tensor.cpu(), first)
    assert bool((view == 9.0).all())


# --- retained=True: the backup of resident memory ---


@pytest.mark.parametrize("backup", ["ram", "pinned", "disk"])
def test_a_retained_backup_is_readable_while_resident_at_one_address(saver, tag, backup):
    with saver.region(tag, backup=backup, retain=True):
        tensor = torch.arange(3_000_000, device=saver.device)
    assert saver.backup_of(tensor, retained=True) is None
    saver.pause(tag)
    first = saver.backup_of(tensor, retained=True)
    address = first.data_ptr()
    assert torch.equal(first, torch.arange(3_000_000))
    saver.resume(tag)
    tensor.add_(1)
    assert saver.backup_of(tensor) is None
    kept = saver.backup_of(tensor, retained=True)
    assert kept.data_ptr() == first.data_ptr() == address
    assert torch.equal(kept, torch.arange(3_000_000))
    saver.pause(tag)
    assert torch.equal(first, torch.arange(1, 3_000_001))  # refreshed where it was
    part = saver.backup_of(tensor[1000::2], retained=True)
    assert part.data_ptr() == address + 8000
    assert torch.equal(part, torch.arange(1001, 3_000_001, 2))
    saver.resume(tag)
    assert torch.equal(tensor.cpu(), torch.arange(1, 3_000_001))


def test_a_resume_may_retain_for_this_once(saver, tag):
    with saver.region(tag):
        tensor = torch.arange(3_000_000, device=saver.device)
    saver.pause(tag)
    saver.resume(tag)
    assert saver.backup_of(tensor, retained=True) is None
    saver.pause(tag)
    shown = saver.backup_of(tensor, retained=True)
    saver.resume(tag, retain=True)
    assert saver.backup_of(tensor, retained=True).data_ptr() == shown.data_ptr()
    saver.pause(tag)
    saver.resume(tag, retain=False)
    assert saver.backup_of(tensor, retained=True) is None
    assert torch.equal(shown, torch.arange(3_000_000))  # it keeps its bytes
    with pytest.raises(TypeError):
        saver.backup_of(tensor, False, True)


def test_values_that_were_noted_as_one_are_shown_and_refreshed(saver, tag):
    with saver.region(tag, retain=True):
        tensor = torch.full((4 << 20,), 7, dtype=torch.uint8, device=saver.device)
    assert saver.pause(tag).constant >= 2 << 20
    saver.resume(tag)
    shown = saver.backup_of(tensor, retained=True)
    assert bool((shown == 7).all())
    tensor.fill_(9)
    assert bool((shown == 7).all())
    saver.pause(tag)
    assert bool((shown == 9).all())
    saver.resume(tag)
    shown.fill_(3)  # reaches nothing: the memory is resident
    saver.pause(tag)
    assert bool((shown == 9).all())
    saver.resume(tag)
    assert bool((tensor == 9).all())
