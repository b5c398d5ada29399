"""`ctx.saved_tensors` of autograd functions written in Python: the objects that were saved, as without LMS."""

import functools
from typing import Any


def follow(extension: Any) -> None:
    """For the rest of the process: graphs outlive LMS. csrc/torch/lms/custom_functions.h says what changes."""
    import torch
    from torch.autograd.function import BackwardCFunction

    if "saved_tensors" not in vars(BackwardCFunction):
        getter = torch._C._FunctionBase.saved_tensors.__get__
        BackwardCFunction.saved_tensors = property(functools.partial(extension.read_saved_tensors, getter))
