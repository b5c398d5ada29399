"""A function of ours in place of `torch.nn.Module.__call__`.

On the class, because a `forward` on an instance breaks pickle, deepcopy and `module.compile()`, and because a hook
can't call the module again. Subclasses with a `__call__` of their own reach it through `super().__call__`.

torch.compile must not see it. Two cases differ:
- Dynamo traces a module and meets the call of a child. It then inlines this function, where `is_compiling()` is a
  constant that leads straight to torch's own.
- A compiled model is called, and dynamo waits for the first frame worth compiling. torch's own function is none, so
  that hooks run outside of the graph. `_skip_code` says the same of ours; and while dynamo waits, the handler is left
  out, whose own functions would be compiled otherwise.
"""

import functools
from collections.abc import Callable
from typing import Any

from ebbtide.torch_support.torch_names import find

# (torch's own call, module, arguments, options) -> what the call returns
Handler = Callable[[Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]


class ModuleCalls:
    """From `replace` until `restore`, each call of a module in eager code goes to the handler."""

    def __init__(self, handler: Handler) -> None:
        import torch

        self._handler: Handler | None = handler
        self._original = torch.nn.Module.__call__
        self._ours = self._make_call()

    def replace(self) -> None:
        """Puts ours in the place of torch's function."""
        import torch

        torch.nn.Module.__call__ = self._ours

    def restore(self) -> None:
        """Puts torch's function back. If another library has wrapped ours since, ours stays and only passes calls on.
        Can be called again.
        """
        import torch

        self._handler = None
        if torch.nn.Module.__call__ is self._ours:
            torch.nn.Module.__call__ = self._original

    def _make_call(self) -> Callable[..., Any]:
        import torch

        original, calls = self._original, self
        is_compiling = torch.compiler.is_compiling
        waiting_compiler = find("_C._dynamo.eval_frame.get_eval_frame_callback")

        def call(self: Any, *arguments: Any, **options: Any) -> Any:
            if is_compiling() or waiting_compiler() or (handler := calls._handler) is None:
                return original(self, *arguments, **options)
            return handler(original, self, arguments, options)

        _skip_code(call.__code__)
        return functools.update_wrapper(call, original)  # dynamo tells torch's own by its name


def _skip_code(code: Any) -> None:
    """Dynamo's own function of this name would import all of dynamo."""
    action = find("_C._dynamo.eval_frame._FrameAction")
    strategy = find("_C._dynamo.eval_frame._FrameExecStrategy")(action.SKIP, action.DEFAULT)
    find("_C._dynamo.eval_frame.set_code_exec_strategy")(code, strategy)
