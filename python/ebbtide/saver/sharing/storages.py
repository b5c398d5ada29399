"""torch's storages: those of this process that others ask for, and those over memory of other processes."""

import ctypes
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ebbtide import driver_choice
from ebbtide.errors import StateError
from ebbtide.processes import borrowed, lent
from ebbtide.processes.borrowed import Loan
from ebbtide.processes.offers import Offered


def offer(storage: torch.UntypedStorage, *, is_held: bool) -> Offered:
    """Lets other processes ask for it. What is queued on the current stream is waited for first.

    Args:
        is_held: keep it alive until it has been attached for the first time.

    Raises: StateError: as `lent.offer`.
    """
    if borrowed.is_borrowed(storage.data_ptr()):
        raise StateError("this memory is another process's: send the share that it came by, or have its owner share it")
    if storage.device.type == "cuda":
        torch.cuda.current_stream(storage.device).synchronize()
    weak, place = StorageWeakRef(storage), (storage.data_ptr(), storage.nbytes())

    def find() -> object | None:
        found: Any = torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
        return found if found is not None and (found.data_ptr(), found.nbytes()) == place else None

    return lent.offer(find, *place, is_held)


def attach(offered: Offered, *, agrees: bool = False) -> torch.UntypedStorage:
    """The storage that was offered, by whatever process. The same memory each time; not always the same object.

    Args:
        agrees: the owner may take the memory away, and gives it back.

    Raises: StateError: as `borrowed.borrow`.
    """
    driver_choice.choose_for_tensors()
    own = lent.find_own(*offered)
    if own is not None:
        assert isinstance(own, torch.UntypedStorage)
        return own
    return _over(borrowed.borrow(*offered, agrees))


class _CudaMemory:
    """What torch makes a tensor of without copying; the tensor keeps it alive."""

    def __init__(self, loan: Loan) -> None:
        data = {"data": (loan.address, False), "strides": None}
        self._loan = loan
        self.__cuda_array_interface__ = {"shape": (loan.size_bytes,), "typestr": "|u1", "version": 2, **data}


def _over(loan: Loan) -> torch.UntypedStorage:
    if driver_choice.choose_for_tensors() != "sim":
        return torch.as_tensor(_CudaMemory(loan), device=torch.device("cuda", loan.device)).untyped_storage()
    kind: Any = type("Memory", (ctypes.c_ubyte * loan.size_bytes,), {})
    memory = kind.from_address(loan.address)
    memory.loan = loan  # the tensor keeps it alive
    return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
