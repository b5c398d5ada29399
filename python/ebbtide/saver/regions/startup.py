"""The start of regions: the first use chooses the driver and puts in place everything that regions need.

This module composes. Only here are the backends of both devices known, and the hooks that are installed in torch.
"""

import contextlib
import os
import sys
import warnings

from ebbtide import _core, settings
from ebbtide.driver_choice import choose_for_tensors
from ebbtide.errors import Error, StateError
from ebbtide.locks import make_lock
from ebbtide.processes import member
from ebbtide.saver.pools import backends, captures, cpu_pools
from ebbtide.saver.pools.backends import PoolBackend
from ebbtide.saver.reclaim import advice
from ebbtide.saver.state import program
from ebbtide.torch_support import versions

_lock = make_lock()


def backend() -> PoolBackend | None:
    """The backend of this process, made by the first call; None where ebbtide is off.

    Raises: StateError: this torch and this driver do not go together, torch is too old, or an allocator setting does
    not work with regions. ValueError: an EBBTIDE_* variable is malformed.
    """
    there = backends.existing_backend()
    if there is not None:
        return there
    driver = choose_for_tensors()
    if driver == "off":
        return None
    with _lock:
        if backends.existing_backend() is None:
            backends.set_backend(_start(driver != "sim"))
    return backends.existing_backend()


def _start(is_on_gpu: bool) -> PoolBackend:
    import torch

    from ebbtide.saver.sharing import torch_queues
    from ebbtide.saver.tensors import address_reads

    versions.check(torch.__version__)
    settings.check_environment()
    for name, meant in settings.misspelt(os.environ).items():
        warnings.warn(f"{name} is none of ebbtide's variables; is {meant} meant?", RuntimeWarning, stacklevel=2)
    made = _start_on_gpu() if is_on_gpu else cpu_pools.make_backend()
    address_reads.install()
    torch_queues.install()
    member.join_if_wanted()
    return made


def _start_on_gpu() -> PoolBackend:
    from ebbtide.saver.pools import cuda_pools

    made = cuda_pools.make_backend()
    captures.install()
    advice.install()
    return made


def device_type() -> str:
    """torch's name for the device that regions cover: "cuda", or "cpu" on the simulated device."""
    there = backend()
    if there is not None:
        return there.device_type
    try:
        import torch
    except ImportError:
        raise StateError("saver.device needs PyTorch: install torch") from None
    return "cuda" if torch.cuda.is_available() else "cpu"


def introduce_program() -> None:
    """In a pauseable program: registers its tag before anything is allocated, and hooks captures and the sharing of
    tensors if torch is imported."""
    own = program.own()
    if own is None:
        return
    with contextlib.suppress(Error):  # in a forked child, where nothing can be paused
        _core.bind_slot(own.tag, 0, own.backup)
    torch = sys.modules.get("torch")
    if torch is not None and torch.version.cuda is not None:
        from ebbtide.saver.sharing import torch_queues

        captures.install()
        torch_queues.install()
