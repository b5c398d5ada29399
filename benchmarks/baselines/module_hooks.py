"""What users do today, and accelerate does for them: weights wait on the host, and hooks copy those of each module for
its forward alone.
"""

from typing import Any

import torch
from torch import nn


class ModuleHooks:
    """Takes weights of a model off the device, from its end on, until so many bytes have left."""

    def __init__(self, model: nn.Module, quota_bytes: int) -> None:
        self.moved_bytes = 0
        self._host: dict[nn.Parameter, torch.Tensor] = {}
        for module in reversed(list(model.modules())):
            own = list(module.parameters(recurse=False))
            size_bytes = sum(parameter.nbytes for parameter in own)
            if not own or self.moved_bytes + size_bytes > quota_bytes:
                continue
            for parameter in own:
                self._host[parameter] = parameter.data.cpu().pin_memory()
                parameter.data = parameter.data.new_empty(0)
            self.moved_bytes += size_bytes
            module.register_forward_pre_hook(self._load)
            module.register_forward_hook(self._drop)

    def _load(self, module: nn.Module, _: Any) -> None:
        for parameter in module.parameters(recurse=False):
            parameter.data = self._host[parameter].to("cuda", non_blocking=True)

    def _drop(self, module: nn.Module, *_: Any) -> None:
        for parameter in module.parameters(recurse=False):
            parameter.data = parameter.data.new_empty(0)
