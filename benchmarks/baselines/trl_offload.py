"""TRL's OffloadActivations, whose origin is torchtune's: saved-tensor hooks over single tensors, with a stream."""

import importlib.metadata
import importlib.util
from collections.abc import Sequence
from typing import Any

from torch import nn

from benchmarks.measured import SkippedError


def make_hooks(parameters: Sequence[nn.Parameter]) -> Any:
    """Its context manager, which leaves the parameters where they are.

    Raises:
        SkippedError: TRL is not installed.
    """
    if importlib.util.find_spec("trl") is None:
        raise SkippedError("TRL is not installed: pip install trl==1.16.0")
    from trl.models.activation_offloading import OffloadActivations

    hooks = OffloadActivations()
    hooks.update_model_params(nn.ParameterList(parameters))
    return hooks


def version() -> str:
    return importlib.metadata.version("trl")
