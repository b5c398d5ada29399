"""OpenRLHF's functions that offload and reload DeepSpeed's states, by the same names and arguments, over ebbtide.

    from ebbtide.integrations.openrlhf import offload_deepspeed_states, reload_deepspeed_states

They replace the functions of `openrlhf.utils.deepspeed.deepspeed_utils`, for every ZeRO stage. As there, the states of
the optimizer, the fp32 parameters and the gradient buffers leave the device, and the parameters that the model computes
with stay. The tensors keep their addresses. OpenRLHF's vLLM engines sleep by `ebbtide.integrations.vllm`.
"""

from typing import Any

from ebbtide.integrations.residency import load, offload, tag_of
from ebbtide.integrations.resting import states_of
from ebbtide.saver.reclaim import torch_cache

# What ZeRO's optimizers call their fp32 parameters and gradients: stage 3, then stages 1 and 2.
_PARTS = (
    "fp32_partitioned_groups_flat",
    "grad_partitions_flat_buffer",
    "_DeepSpeedZeroOptimizer_Stage3__ipg_bucket_flat_buffer",
    "single_partition_of_fp32_groups",
    "averaged_gradients",
)


def offload_deepspeed_states(model: Any, pin_memory: bool = True, non_blocking: bool = True) -> None:
    """Takes the states of a DeepSpeed engine off the device. Does nothing where DeepSpeed keeps them on the CPU.

        offload_deepspeed_states(engine)

    Args:
        model: the engine.
        pin_memory: keep them in pinned memory, which stays for the next time.
        non_blocking: accepted; all copies are over when this returns.

    Raises:
        As `saver.adopt` and `saver.pause`.
    """
    if _keeps_states_on_the_cpu(model):
        return
    zero = model.optimizer
    parts = [part for part in (getattr(zero, name, None) for name in _PARTS) if part is not None]
    states = states_of(getattr(zero, "optimizer", zero))
    offload(tag_of(model, "openrlhf.states"), *parts, *states, backup="pinned" if pin_memory else "ram")
    if hasattr(model, "empty_partition_cache"):
        model.empty_partition_cache()
    torch_cache.empty()
    _wait_for_all_ranks()


def reload_deepspeed_states(model: Any, non_blocking: bool = True) -> None:
    """Brings them back.

        reload_deepspeed_states(engine)

    Args:
        model: the engine.
        non_blocking: accepted; all copies are over when this returns.

    Raises:
        As `saver.resume`.
    """
    if _keeps_states_on_the_cpu(model):
        return
    load(tag_of(model, "openrlhf.states"))
    _wait_for_all_ranks()


def _keeps_states_on_the_cpu(model: Any) -> bool:
    settings = model.config["zero_optimization"].get("offload_optimizer") or {}
    return bool(settings.get("device") == "cpu")


def _wait_for_all_ranks() -> None:
    import torch

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.barrier()
