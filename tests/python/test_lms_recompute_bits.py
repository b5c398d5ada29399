"""Whether two tensors hold the same bits."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")
from ebbtide.lms.recompute import bits  # noqa: E402
from torch import nn  # noqa: E402

NAN = float("nan")


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (torch.tensor([NAN, 1.0]), torch.tensor([NAN, 1.0]), ""),
        (torch.tensor([0.0]), torch.tensor([-0.0]), "bits"),
        (torch.zeros(2), torch.zeros(2).double(), "dtype"),
        (torch.zeros(2), torch.zeros(1, 2), "shape"),
        (torch.zeros(2, 2), torch.zeros(2, 2).T, "strides"),
        (torch.zeros(2), torch.zeros(2, requires_grad=True), "requires_grad"),
        (torch.zeros(2), nn.Parameter(torch.zeros(2), requires_grad=False), "class"),
        (torch.zeros(2), torch.zeros(2).to_sparse(), "layout"),
        (torch.ones(2).to_sparse(), torch.ones(2).to_sparse(), "a kind of tensor"),
        (torch.tensor([1j, NAN]), torch.tensor([1j, NAN]), ""),
        (torch.tensor([1j]), torch.tensor([1j]).conj(), "lazy sign"),
        (torch.tensor([1j]).conj(), torch.tensor([1j]).conj(), ""),
        (torch.tensor([1 + 1j]).conj().imag, torch.tensor([1 + 1j]).conj().imag, ""),
        (torch.tensor([True]), torch.tensor([False]), "bits"),
        (torch.ones(3).bfloat16(), torch.ones(3).bfloat16(), ""),
        (torch.ones(3).to(torch.float8_e4m3fn), torch.ones(3).to(torch.float8_e4m3fn), ""),
        (torch.ones(6)[::2], torch.ones(6)[::2], ""),
        (torch.ones(0), torch.ones(0), ""),
        (torch.ones(2, device="meta"), torch.ones(2, device="meta"), ""),
    ],
)
def test_bits(one: Any, other: Any, expected: str) -> None:
    assert bits.difference(one, other) == expected


def test_bits_of_tensors_in_tensors() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    same = TwoTensor(torch.ones(2), torch.ones(2))
    assert bits.difference(same, TwoTensor(torch.ones(2), torch.ones(2))) == ""
    assert bits.difference(same, TwoTensor(torch.ones(2), torch.zeros(2))) == "bits"
