"""EBBTIDE_CHECK=1: checks each op's tensors before it runs. A tensor whose memory is away is an error, not a crash.

The StateError names the op, the argument, the tensor's shape and dtype, and the tag. The check works on the simulated
device and on a GPU alike. It is a debugging aid: each op costs tens of microseconds more.

It checks the bytes that a tensor really spans (its strides and offset, not its whole storage): in positional and
keyword arguments, in lists, tuples and dicts, in the parts of sparse tensors, and in subclasses that list their parts
(`__tensor_flatten__`). Views touch no bytes and pass. So do factories such as `empty_like`, which take only a shape
from their argument.

It is a TorchDispatchMode, and torch treats it as one. `torch.compile` runs its functions eagerly meanwhile. What
insists on a whole graph (`fullgraph=True`, `flex_attention`) and `torch.jit.trace` refuse to work.

`reads` covers reads of memory that are no ops, in every thread: printing, `tolist`, `numpy`, `numpy.asarray`,
DLPack, `__cuda_array_interface__`, pickling, `torch.save`, `deepcopy`, `apply_` and `map_`.

The check does not see:
- Calls that Python does not see: direct calls of Triton kernels and extensions, replays of CUDA graphs, system calls
  that are given the memory (they fail with EFAULT), and reads through an address or a view that was handed out earlier
  (`data_ptr()`, NumPy, DLPack).
- `torch.tensor`, `as_tensor` and `asarray` of lists that contain paused tensors, and `torch.save` of a bare storage.
- Ops of other threads: a mode belongs to its thread. Threads that enter a region are checked from then on; others call
  `enable` themselves. Backward is checked if the thread that calls it is, also in autograd's own threads, to which
  torch passes the mode.
- The inner calls of an op of a tensor subclass.
- Memory that leaves while the op runs.
"""

import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar

import torch
from torch._C import (
    _get_dispatch_stack_at,
    _len_torch_dispatch_stack,
    _pop_torch_dispatch_stack,
    _push_on_torch_dispatch_stack,
)
from torch.utils._python_dispatch import TorchDispatchMode

from ebbtide import _core
from ebbtide.errors import StateError
from ebbtide.saver.check import reads

# These ops use only their argument's shape, dtype and device.
_SHAPE_ONLY = frozenset(
    f"aten::{name}"
    for name in (
        *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
        *("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"),
        *("is_same_size", "_has_compatible_shallow_copy_type"),
    )
)
_T = TypeVar("_T")
_touches_bytes: dict[Any, bool] = {}
_thread = threading.local()


def enable() -> None:
    """Checks this thread's ops from now on. Where the thread is checked already, nothing changes.

    Raises (from any op afterwards):
        StateError: a tensor that the op takes lies in memory that is away.
    """
    if getattr(_thread, "mode", None) is None:
        _thread.mode = _CheckMode()
        _enter_below_other_modes(_thread.mode)
        reads.begin(_check_read)
    extension = sys.modules.get("ebbtide._torch")  # the simulated device's; a region loads it before it asks for this
    if extension is not None:
        extension.say_ops_are_checked(True)


def _enter_below_other_modes(mode: TorchDispatchMode) -> None:
    """The thread's other modes come and go as a stack, and ours outlives them."""
    above = []
    while _len_torch_dispatch_stack() > 0:
        # torch's own modes (fake tensors, tracing) have a mode key, and places of their own in the stack.
        if getattr(_get_dispatch_stack_at(_len_torch_dispatch_stack() - 1), "_mode_key", None) is not None:
            break
        above.append(_pop_torch_dispatch_stack(None))
    try:
        mode.__enter__()
    finally:
        for each in reversed(above):
            _push_on_torch_dispatch_stack(each)


class _CheckMode(TorchDispatchMode):
    # torch (from 2.8 on) refuses ops that take functions (cond, flex_attention) under a mode without this attribute.
    supports_higher_order_operators = True

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _op_touches_bytes(func):
            places: Iterator[tuple[int | str, Any]] = chain(enumerate(args), kwargs.items())
            for place, value in places:
                _check_value(func, place, value)
        return func(*args, **kwargs)


def _op_touches_bytes(func: Any) -> bool:
    known = _touches_bytes.get(func)
    if known is None:
        known = _touches_bytes[func] = _find_whether_it_touches(func)
    return known


def _find_whether_it_touches(func: Any) -> bool:
    schema = getattr(func, "_schema", None)
    if schema is None:
        return True
    if schema.name in _SHAPE_ONLY:
        return False
    if schema.name != "aten::resize_" and torch.Tag.inplace_view in func.tags:
        return False
    # Only aten: asking torch for the kernels of prim::device, for one, ends the process.
    if not func.is_view or func.namespace != "aten":
        return True
    # In inference mode, reshape and contiguous arrive as whole ops that claim to be views and may copy.
    return bool(func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd))


def _check_value(func: Any, place: int | str, value: Any) -> None:
    for tensor in _instances(torch.Tensor, value):
        for address, size_bytes in _spans(tensor):
            if _core.is_missing(address, size_bytes):
                raise StateError(_describe(func, place, tensor, address))


def _check_read(title: str, value: Any) -> None:
    _check_value(title, "self", value)
    for storage in _instances(torch.UntypedStorage, value):
        address, size_bytes = storage.data_ptr(), storage.nbytes()
        if _core.is_missing(address, size_bytes):
            raise StateError(f"{title}: the storage of {size_bytes} bytes {_say_where(address)}")


def _instances(kind: type[_T], value: Any) -> Iterator[_T]:
    """Those in the value, and in the lists, tuples and dicts that it consists of."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _instances(kind, item)


def _spans(tensor: torch.Tensor) -> Iterator[tuple[int, int]]:
    """(address, size in bytes) of the memory that the tensor reaches; nothing for one without memory of its own."""
    for part in _parts(tensor):
        if part is not tensor:
            yield from _spans(part)
            continue
        if part.layout is not torch.strided or not torch._C._has_storage(part) or part.device.type == "meta":
            continue
        address = torch._C._data_address(part)  # unlike data_ptr, leaves a copy-on-write tensor as it is
        if address == 0:
            continue
        if part.is_nested:
            yield address, part.untyped_storage().nbytes()
        elif part.numel() > 0:
            reach = sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True))
            yield address, (reach + 1) * part.element_size()


def _parts(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    if type(tensor).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl:
        # Its ops are its own. Fake and functional tensors, which do not list their parts, must not even be
        # asked for their memory: torch may abort.
        flatten = getattr(tensor, "__tensor_flatten__", None)
        return [] if flatten is None else [getattr(tensor, name) for name in flatten()[0]]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor]


def _describe(func: Any, place: int | str, tensor: torch.Tensor, address: int) -> str:
    schema = getattr(func, "_schema", None)
    if schema is not None and isinstance(place, int) and place < len(schema.arguments):
        place = schema.arguments[place].name
    return (
        f"{func}: the tensor of shape {_shape_of(tensor)} and {tensor.dtype} in argument {place!r} "
        f"{_say_where(address)}"
    )


def _shape_of(tensor: torch.Tensor) -> str:
    return "(nested)" if tensor.is_nested else str(list(tensor.shape))  # a nested tensor's sizes may be away, too


def _say_where(address: int) -> str:
    found = _core.find(address)
    tag = "unknown" if found is None else found.tag
    return f"lies in tag {tag!r}, which is paused. Resume {tag!r} before this, or take the tensor out of it."
