"""`Pending.attach`: a module's forward waits for each layer's bytes as it comes to them."""

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from ebbtide.saver.pending import Pending

# Their forward reads the parameters of modules inside them without calling those.
_READ_INNER_MODULES = (torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer)


class Attachment:
    """The hooks of one `attach`."""

    def __init__(self, pending: "Pending", module: torch.nn.Module) -> None:
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"attach takes a torch.nn.Module, not {type(module).__name__}")
        self._pending = pending
        self._handles: list[Any] = []
        if pending.done:
            pending._check()
            return
        for part in module.modules():
            if _tensors_read_by(part):
                # First of all: another hook (weight_norm, say) may read parameters.
                self._handles.append(part.register_forward_pre_hook(self._before_forward, prepend=True))

    def remove(self) -> None:
        """Takes the hooks out. Twice does nothing."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()

    def _before_forward(self, module: torch.nn.Module, _arguments: Any) -> None:
        if self._pending.done:
            self.remove()
            self._pending._check()
            return
        self._pending.stream_wait(tensors=_tensors_read_by(module))


def _tensors_read_by(module: torch.nn.Module) -> list[torch.Tensor]:
    is_deep = isinstance(module, _READ_INNER_MODULES)
    return [*module.parameters(recurse=is_deep), *module.buffers(recurse=is_deep)]
