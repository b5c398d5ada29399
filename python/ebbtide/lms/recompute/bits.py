"""Whether two tensors hold the same bits. A NaN equals itself."""

from typing import Any

from ebbtide.torch_support.torch_names import find


def difference(one: Any, other: Any) -> str:
    """What differs, as a noun; "" if nothing, and "a kind of tensor" for one that has no plain memory."""
    import torch

    for name in ("dtype", "device", "layout", "shape", "requires_grad"):
        if getattr(one, name) != getattr(other, name):
            return name
    if type(one) is not type(other):
        return "class"
    if find("utils._python_dispatch.is_traceable_wrapper_subclass")(one):
        return _difference_inside(one, other)
    if one.layout is not torch.strided or one.is_quantized or not find("_C._has_storage")(one):
        return "a kind of tensor"
    if one.stride() != other.stride():
        return "strides"
    if one.is_conj() != other.is_conj() or one.is_neg() != other.is_neg():
        return "lazy sign"
    return "" if _are_bits_equal(one.detach(), other.detach()) else "bits"


def _difference_inside(one: Any, other: Any) -> str:
    names, _ = one.__tensor_flatten__()
    if names != other.__tensor_flatten__()[0]:
        return "class"
    return next(filter(None, (difference(getattr(one, name), getattr(other, name)) for name in names)), "")


def _are_bits_equal(one: Any, other: Any) -> bool:
    import torch

    if one.is_meta or find("_C._data_address")(one) == find("_C._data_address")(other):
        return True
    if one.is_complex():
        one, other = torch.view_as_real(one.resolve_conj()), torch.view_as_real(other.resolve_conj())
    one, other = one.resolve_neg(), other.resolve_neg()
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    kind = integers[one.element_size()]
    return torch.equal(one.view(kind), other.view(kind))
