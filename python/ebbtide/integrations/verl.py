"""verl's functions that offload and load models and optimizers, by the same names and arguments, over ebbtide.

    from ebbtide.integrations.verl import load_fsdp_model_to_gpu, offload_fsdp_model_to_cpu

They replace those of `verl.utils.fsdp_utils` and `verl.utils.megatron_utils`. No tensor moves to another device. An
offloaded parameter still says that it is on the GPU, at the address that it had, and must not be read until it is
loaded. verl itself does that in one place: FSDPEngine.get_per_tensor_param reads the state dict after it has
offloaded the model. Load the model before those parameters are consumed. EBBTIDE_CHECK=1 finds such reads.
"""

import gc
from collections.abc import Iterable, Sequence
from itertools import count, filterfalse
from typing import Any
from weakref import WeakKeyDictionary, ref

from ebbtide import driver_choice, saver
from ebbtide.integrations.resting import adopt, states_of
from ebbtide.locks import make_lock
from ebbtide.saver.reclaim import torch_cache
from ebbtide.saver.values.arguments import BackupName

_lock = make_lock()
_numbers = count()
_names: "WeakKeyDictionary[Any, str]" = WeakKeyDictionary()
_owners: "dict[str, ref[Any]]" = {}  # by tag, until the tag of a dead owner has been trimmed


def offload_fsdp_model_to_cpu(model: Any, empty_cache: bool = True) -> None:
    """Takes a model's parameters, buffers and gradients off the device: FSDP 1 or 2, or a plain module.

        offload_fsdp_model_to_cpu(model)

    Raises:
        As `saver.adopt` and `saver.pause`.
    """
    _offload(_tag_of(model, "model"), model, empty_cache=empty_cache)


def load_fsdp_model_to_gpu(model: Any) -> None:
    """Brings them back. Tensors that were on another device from the start move to this process's device.

        load_fsdp_model_to_gpu(model)

    Raises:
        As `saver.resume`.
    """
    _load(_tag_of(model, "model"))
    if any(tensor.device.type not in (saver.device, "meta") for tensor in [*model.parameters(), *model.buffers()]):
        model.to(saver.device)


offload_fsdp2_model_to_cpu = offload_fsdp_model_to_cpu
load_fsdp2_model_to_gpu = load_fsdp_model_to_gpu


def offload_fsdp_optimizer(optimizer: Any) -> None:
    """Takes the states of an optimizer off the device. One that has made none yet is left alone.

    For example:

        offload_fsdp_optimizer(optimizer)
    """
    if optimizer.state:
        _offload(_tag_of(optimizer, "optimizer"), *states_of(optimizer))


def load_fsdp_optimizer(optimizer: Any, device_id: Any) -> None:
    """Brings them back. States on another device, from a checkpoint say, move to `device_id`.

    Step counts that torch keeps on the host, as it does without `fused` and `capturable`, stay there: on the device,
    each would be waited for in each step.

    For example:

        load_fsdp_optimizer(optimizer, saver.device)
    """
    import torch

    _load(_tag_of(optimizer, "optimizer"))
    groups = [group for group in optimizer.param_groups if not (group.get("fused") or group.get("capturable"))]
    counted_on_host = {id(parameter) for group in groups for parameter in group["params"]}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if key == "step" and id(parameter) in counted_on_host:
                continue
            if isinstance(value, torch.Tensor) and value.device.type != saver.device:
                state[key] = value.to(device_id, non_blocking=True)


def offload_megatron_model_to_cpu(models: Sequence[Any]) -> None:
    """Takes the chunks of a model off the device. The content of DistributedDataParallel's gradient buffers is dropped,
    as verl drops it. Frozen parameters, such as a base model's below LoRA, lie in no such buffer and leave by a tag of
    their own.

    For example:

        offload_megatron_model_to_cpu([model])
    """
    for chunk in models:
        buffers = _buffers_of(chunk)
        if buffers is None:
            _offload(_tag_of(chunk, "model"), chunk)
        else:
            _offload(_tag_of(chunk, "model"), *(buffer.param_data for buffer in buffers))
            _offload(_tag_of(chunk, "gradients"), *(buffer.grad_data for buffer in buffers), backup=None)
            frozen = [parameter for parameter in chunk.module.parameters() if not parameter.requires_grad]
            if frozen:
                _offload(_tag_of(chunk, "frozen"), frozen)
    gc.collect()
    torch_cache.empty()


def load_megatron_model_to_gpu(models: Sequence[Any], load_grad: bool = True, load_frozen_params: bool = True) -> None:
    """Brings the chunks back. With `load_grad`, the gradient buffers too, as zeros. Frozen parameters of a
    DistributedDataParallel stay away without `load_frozen_params`.

    For example:

        load_megatron_model_to_gpu([model])
    """
    for chunk in models:
        _load(_tag_of(chunk, "model"))
        if load_frozen_params:
            _load(_tag_of(chunk, "frozen"))
        tag = _tag_of(chunk, "gradients")
        if load_grad and tag in saver.tags() and saver.is_paused(tag):
            _load(tag)
            for buffer in _buffers_of(chunk) or ():
                buffer.grad_data.zero_()


def offload_megatron_copy_params(optimizers: Any) -> None:
    """Takes the optimizer's fp32 copies of parameters off the device.

    For example:

        offload_megatron_copy_params(optimizer)
    """
    for optimizer in _chained(optimizers):
        groups = getattr(optimizer, "shard_fp32_from_float16_groups", None)
        if groups is not None:
            # Without their gradients, which lie in the model's buffers, and may be away. With a precision-aware
            # optimizer there are no copies.
            parts = [part for group in groups for part in (group if isinstance(group, (list, tuple)) else [group])]
            _offload(_tag_of(optimizer, "copies"), [copy.detach() for copy in parts if copy is not None])


def load_megatron_copy_params(optimizers: Any) -> None:
    """Brings them back.

    For example:

        load_megatron_copy_params(optimizer)
    """
    for optimizer in _chained(optimizers):
        _load(_tag_of(optimizer, "copies"))


def offload_megatron_optimizer(optimizers: Any) -> None:
    """Takes the optimizer's copies of parameters and its states off the device. States on the CPU stay there.

    For example:

        offload_megatron_optimizer(optimizer)
    """
    for optimizer in _chained(optimizers):
        offload_megatron_copy_params(optimizer)
        inner = optimizer.optimizer
        if inner is not None:  # a pipeline stage may have no parameters
            parts = getattr(inner, "sub_optimizers", [inner])
            _offload(_tag_of(optimizer, "optimizer"), *(state for part in parts for state in states_of(part)))
    gc.collect()
    torch_cache.empty()


def load_megatron_optimizer(optimizers: Any) -> None:
    """Brings them back.

    For example:

        load_megatron_optimizer(optimizer)
    """
    for optimizer in _chained(optimizers):
        _load(_tag_of(optimizer, "copies"), _tag_of(optimizer, "optimizer"))


def _chained(optimizers: Any) -> Iterable[Any]:
    found: Iterable[Any] = getattr(optimizers, "chained_optimizers", (optimizers,))
    return found


def _buffers_of(chunk: Any) -> list[Any] | None:
    """The buffers of Megatron's DistributedDataParallel; None for any other module, whose `buffers` is a method."""
    if callable(chunk.buffers):
        return None
    return [*chunk.buffers, *getattr(chunk, "expert_parallel_buffers", ())]


def _tag_of(owner: Any, part: str) -> str:
    """The tag of one part of a model or an optimizer, the same at every call: "verl.3.model"."""
    with _lock:
        if owner not in _names:
            _names[owner] = str(next(_numbers))
        tag = f"verl.{_names[owner]}.{part}"
        _owners[tag] = ref(owner)
        return tag


def _offload(tag: str, *things: Any, backup: BackupName | None = "ram", empty_cache: bool = False) -> None:
    """Moves the tensors of `things` into the tag, unless they are there, and pauses it. A paused tag stays as it is."""
    if driver_choice.is_off():
        return
    _trim_tags_of_dead_owners()
    if tag not in saver.tags() or not saver.is_paused(tag):
        adopt(list(things), tag, backup)
        saver.pause(tag, missing_ok=True)
    if empty_cache:
        torch_cache.empty()


def _load(*tags: str) -> None:
    saver.resume(*tags, missing_ok=True)


def _trim_tags_of_dead_owners() -> None:
    """Gives their memory back, on the device and on the host."""
    with _lock:
        dead = list(filterfalse(lambda tag: _owners[tag]() is not None, _owners))
        for tag in dead:
            del _owners[tag]
    if dead:
        saver.trim(*dead, missing_ok=True)
