"""Autograd functions written in Python: backward reads the objects that were saved, as without LMS."""

import functools
from typing import Any

_MARK = "_ebbtide_copies_what_it_read"


def follow(extension: Any) -> None:
    """For the rest of the process: graphs outlive LMS. csrc/torch/lms/custom_functions.h says what changes."""
    import torch
    from torch.autograd.function import BackwardCFunction

    for name in ("saved_tensors", "saved_variables"):  # the latter is deprecated
        getter = getattr(torch._C._FunctionBase, name, None)
        if getter is not None and name not in vars(BackwardCFunction):
            read = functools.partial(extension.read_saved_tensors, getter.__get__)
            setattr(BackwardCFunction, name, property(read))
    for name in ("apply", "apply_boxed"):  # the latter from torch 2.13 on
        plain = vars(BackwardCFunction).get(name)
        if plain is not None and not hasattr(plain, _MARK):
            setattr(BackwardCFunction, name, _copying(extension, plain))


def _copying(extension: Any, plain: Any) -> Any:
    @functools.wraps(plain)
    def apply(*arguments: Any) -> Any:
        return extension.run_backward(plain, *arguments)

    setattr(apply, _MARK, True)
    return apply
