"""What forbids to run a call again, as far as torch's state, the module and the arguments tell before the call."""

import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from ebbtide.lms.recompute.module_states import Subtree, random_sources
from ebbtide.lms.recompute.structures import Structure
from ebbtide.torch_support.torch_names import find

# Hooks would run twice. torch keeps those with keywords, and those that are always called, in these dicts as well.
HOOKS = {
    "_forward_hooks": "a forward hook",
    "_forward_pre_hooks": "a forward pre-hook",
    "_backward_hooks": "a backward hook",
    "_backward_pre_hooks": "a backward pre-hook",
}
# By name, so that no module of torch.distributed is imported.
WRAPPERS = {
    "DistributedDataParallel": "it synchronises its parameters with other ranks",
    "FullyShardedDataParallel": "it gathers its parameters from other ranks",
    "FSDPModule": "it gathers its parameters from other ranks",
    "CheckpointWrapper": "it is checkpointed by the program",
    "ScriptModule": "it is a TorchScript module",
    "GraphModule": "it is a graph, of compiled code perhaps",
}


# --- torch's state ---


class _State(NamedTuple):
    """What torch tells of itself, looked up once: `find` takes longer than all of `may_decide`."""

    top_hooks: Callable[[bool], Any]
    are_hooks_enabled: Callable[[], bool]
    running_backward: Callable[[], int]
    transform: Callable[[], Any]
    dispatch_modes: Callable[[], int]
    function_modes: Callable[[], int]
    function_mode_at: Callable[[int], Any]
    device_context: type


@functools.cache
def _state() -> _State:
    from torch.utils._device import DeviceContext

    return _State(
        find("_C._autograd._top_saved_tensors_default_hooks"),
        find("_C._autograd._saved_tensors_hooks_is_enabled"),
        find("_C._current_graph_task_id"),
        find("_C._functorch.peek_interpreter_stack"),
        find("_C._len_torch_dispatch_stack"),
        find("_C._len_torch_function_stack"),
        find("_C._get_function_stack_at"),
        DeviceContext,
    )


def may_decide() -> bool:
    """Whether a call that begins now in this thread may be recomputed.

    Not without gradients, in compiled or traced code, in a transform of torch.func, in a running backward, while a CUDA
    graph is captured, or under modes that see operations, which would see them twice. Not under saved-tensor hooks
    either: those of a program would lose what the call saves, and those of a checkpoint recompute it already.
    """
    import torch

    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return False
    state = _state()
    if state.running_backward() != -1 or state.transform() is not None or state.dispatch_modes():
        return False
    if not state.are_hooks_enabled() or state.top_hooks(True) is not None or torch.jit.is_tracing():
        return False
    if not state.function_modes():
        return not _is_capturing()
    # torch.set_default_device and `with torch.device(...)` are modes, too. A checkpoint enters them again.
    modes = map(state.function_mode_at, range(state.function_modes()))
    return all(isinstance(mode, state.device_context) for mode in modes) and not _is_capturing()


def _is_capturing() -> bool:
    import torch

    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


# --- modules and arguments ---

_of_classes: weakref.WeakKeyDictionary[type, str] = weakref.WeakKeyDictionary()


def call_objection(subtree: Subtree, structure: Structure) -> str:
    """Why calls of a module with such arguments can't be recomputed, as a sentence fragment for a report; "" if nothing
    speaks against it. `module_objection` asks for more.
    """
    if structure.unknown:
        return structure.unknown
    # torch's own list of them names each one, which takes three times as long.
    parameters = [one for each in subtree.modules for one in each._parameters.values() if one is not None]
    return _objection_to_tensors([*parameters, *structure.tensors])


def module_objection(subtree: Subtree) -> str:
    """Why no call of a module can be recomputed. Looks at the whole subtree each time: hooks may be added at any
    moment.
    """
    if any(_hooks_of_all_modules()):
        return "the program has hooks on all modules"
    sources = frozenset(random_sources())
    for index, (one, names) in enumerate(zip(subtree.modules, subtree.names, strict=True)):
        if problem := _objection_to_class(type(one)) or _objection_to_attributes(one, names, sources):
            path = subtree.path(index)
            return f"{problem} ({path})" if path else problem
    return ""


@functools.cache
def _hooks_of_all_modules() -> tuple[dict[int, Any], ...]:
    return (
        find("nn.modules.module._global_forward_hooks"),
        find("nn.modules.module._global_forward_pre_hooks"),
        find("nn.modules.module._global_backward_hooks"),
        find("nn.modules.module._global_backward_pre_hooks"),
    )


def _objection_to_class(kind: type) -> str:
    found = _of_classes.get(kind)
    if found is None:
        found = next((WRAPPERS[base.__name__] for base in kind.__mro__ if base.__name__ in WRAPPERS), "")
        _of_classes[kind] = found
    return found


def _objection_to_attributes(module: Any, names: tuple[str, ...], random_sources: frozenset[type]) -> str:
    attributes = vars(module)
    if any(map(attributes.get, HOOKS)):
        return next(f"it has {kind}" for name, kind in HOOKS.items() if attributes.get(name))
    # transformers checkpoints such a layer itself.
    checkpoints = attributes.get("gradient_checkpointing", getattr(type(module), "gradient_checkpointing", False))
    if checkpoints and module.training:
        return "it is checkpointed by the program"
    kinds = [type(attributes[name]) for name in names]
    if not random_sources.isdisjoint(kinds):
        source = next(iter(random_sources.intersection(kinds)))
        return f"it holds a {source.__name__} of its own"
    return ""


def _objection_to_tensors(tensors: list[Any]) -> str:
    import torch

    lazy = torch.nn.parameter.UninitializedTensorMixin
    if any(isinstance(tensor, lazy) for tensor in tensors):
        return "it has parameters that are made in its first call"
    if any(map(torch.is_inference, tensors)):
        return "it uses a tensor of torch.inference_mode"
    if not any(tensor.requires_grad for tensor in tensors):
        return "it needs no gradient"
    return ""
