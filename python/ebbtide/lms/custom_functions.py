"""`ctx.saved_tensors` of autograd functions written in Python: the objects that were saved, as without LMS."""

import functools
from typing import Any


def follow(extension: Any) -> None:
    """For the rest of the process: graphs outlive LMS. csrc/torch/lms/custom_functions.h says what changes."""
    import torch
    from torch.autograd.function import BackwardCFunction

    for name in ("saved_tensors", "saved_variables"):  # the latter is deprecated
        getter = getattr(torch._C._FunctionBase, name, None)
        if getter is not None and name not in vars(BackwardCFunction):
            read = functools.partial(extension.read_saved_tensors, getter.__get__)
            setattr(BackwardCFunction, name, property(read))
