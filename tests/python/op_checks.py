"""The check of ops for the length of a `with`. The product never ends it."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from ebbtide.saver.check import ops, reads


@contextmanager
def checked() -> Iterator[None]:
    is_outermost = getattr(ops._thread, "mode", None) is None
    ops.enable()
    try:
        yield
    finally:
        if is_outermost:
            end()


def end() -> None:
    """Ends the check of this thread, below the thread's other modes, and that of reads."""
    mode, ops._thread.mode = ops._thread.mode, None
    above = []
    while torch._C._get_dispatch_stack_at(torch._C._len_torch_dispatch_stack() - 1) is not mode:
        above.append(torch._C._pop_torch_dispatch_stack(None))
    mode.__exit__(None, None, None)
    for each in reversed(above):
        torch._C._push_on_torch_dispatch_stack(each)
    reads.is_on = False
    if "ebbtide._torch" in sys.modules:
        sys.modules["ebbtide._torch"].say_ops_are_checked(False)
