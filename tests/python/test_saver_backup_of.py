"""saver.backup_of: the stored bytes of a paused tensor as a tensor, without a copy."""

import gc

import pytest

torch = pytest.importorskip("torch")


def test_none_while_resident_and_outside_regions(saver, tag):
    plain = torch.ones(10, device=saver.device)
    with saver.region(tag):
        inside = torch.ones(10, device=saver.device)
    assert saver.backup_of(plain) is None
    assert saver.backup_of(inside) is None
    assert saver.backup_of(torch.ones(3, device="meta")) is None
    assert saver.backup_of(torch.empty(0)) is None


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


def test_none_where_the_content_was_dropped(saver, tag):
    with saver.region(tag, backup=None):
        tensor = torch.ones(1000, device=saver.device)
    saver.pause(tag)
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
