"""Whether anything but a parameter, or a gradient, knows its memory: LMS moves it only then."""

import sys
from collections import Counter
from typing import Any

from ebbtide import _core
from ebbtide.lms import outside
from ebbtide.lms.devices import Device


class Owners:
    """Compares a tensor's owners with those of one that nothing else knows."""

    def __init__(self, device: Device) -> None:
        import torch

        self._device = device
        probe = torch.nn.Parameter(torch.empty(1))
        probe.grad = torch.empty(1)
        self._of_parameter, self._of_gradient = _count(probe), _count(probe.grad)

    def is_parameter_alone(self, parameter: Any) -> bool:
        return self._is_own(parameter) and _count(parameter) == self._of_parameter

    def is_gradient_alone(self, gradient: Any) -> bool:
        return self._is_own(gradient) and _count(gradient) == self._of_gradient

    def sort(self, parameters: list[Any], tag: str) -> Counter[str]:
        """How many bytes of those that have not got memory of the tag have which reason."""
        sizes: Counter[str] = Counter()
        for parameter in parameters:
            info = _core.find(parameter.data_ptr())
            if info is None or info.tag != tag:
                sizes[self._reason(parameter, info)] += parameter.nbytes
        return sizes

    def _reason(self, parameter: Any, info: Any) -> str:
        if info is not None and not self._device.is_ordinary(parameter):
            return f"they have the tag {info.tag!r}"
        if not self._is_own(parameter):
            return outside.NOT_OWN
        return outside.NO_ROOM if self.is_parameter_alone(parameter) else outside.SHARED

    def _is_own(self, tensor: Any) -> bool:
        # A storage that was lent to NumPy can't be resized.
        return self._device.is_ordinary(tensor) and bool(tensor.untyped_storage().resizable())


def _count(tensor: Any) -> tuple[int, ...]:
    """Of the tensor, of its storage, and of the storage's Python object. What torch itself owns of them depends on its
    version.
    """
    import torch

    storage = tensor.untyped_storage()
    return tensor._use_count(), torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)
