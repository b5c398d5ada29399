"""Plain tensors: those with one range of bytes."""

from typing import TYPE_CHECKING, Any

from ebbtide.saver.tensors.walk import why_without_memory

if TYPE_CHECKING:
    import torch


def check_plain(tensor: Any, caller: str, *, is_read: bool) -> None:
    """
    Args:
        is_read: its bytes are to be its values in order.

    Raises: TypeError: no tensor with one range of bytes.
    """
    import torch

    unusual = _unusual_kind(tensor, is_read=is_read) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
    if unusual:
        raise TypeError(f"{caller} takes a plain strided tensor, not {unusual}")


def _unusual_kind(tensor: "torch.Tensor", *, is_read: bool) -> str | None:
    """The kind of a tensor that has no one range of bytes, or where it is to be read, whose bytes are not simply its
    values in order; None for a plain one."""
    import torch
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    if is_traceable_wrapper_subclass(tensor):
        return f"a {type(tensor).__name__}: ask for the tensors that it wraps"
    if tensor.layout is not torch.strided:
        return f"a {tensor.layout} tensor: ask for the tensors that it consists of, if it has any"
    if tensor.is_meta:
        return None
    kind = why_without_memory(tensor)
    if kind is not None or not is_read:
        return kind
    if tensor.is_nested:
        return "a nested tensor: resume its tag to read it"
    if tensor.is_quantized:
        return "a quantized tensor: its bytes alone are not its values. Resume its tag to read it"
    return None
