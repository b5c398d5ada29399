"""Fine-tuning a language model of Qwen2.5-7B's shape, whose weights, gradients and states are most of what it needs.

In all the memory, also with TRL's offload of activations; with large model support, and its step in backward; with
FSDP2's offload to the CPU.

Weights are fp32 and random, autocast is bf16, the optimizer is fused AdamW, and the library checkpoints the blocks.
"""

import gc
import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import ebbtide
import torch
from ebbtide import saver

from benchmarks import device
from benchmarks.baselines import trl_offload
from benchmarks.lms_training import Peak, simulated, time_steps
from benchmarks.measured import Measured, Part
from benchmarks.sizes import MIB, FinetuneSize, Sizes

RATE = 1e-5
LIMIT_TOLERANCE = 0.02  # of the limit, that the driver may count beyond it


def make_model(size: FinetuneSize, layers: int) -> Any:
    library: Any = importlib.import_module("transformers")
    torch.manual_seed(0)
    config = library.Qwen2Config(
        hidden_size=size.hidden,
        intermediate_size=size.feed,
        num_hidden_layers=layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.key_heads,
        vocab_size=size.vocabulary,
        use_cache=False,
    )
    with torch.device(saver.device):
        model = library.Qwen2ForCausalLM(config).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def make_loss(size: FinetuneSize, model: Any, batch: int) -> Callable[[], torch.Tensor]:
    generator = torch.Generator(saver.device).manual_seed(1)
    shape = (batch, size.tokens)
    words = torch.randint(size.vocabulary, shape, generator=generator, device=saver.device)

    def loss() -> torch.Tensor:
        with torch.autocast(saver.device, torch.bfloat16):
            found: torch.Tensor = model(input_ids=words, labels=words).loss
        return found

    return loss


def time_training(
    measured: Measured,
    size: FinetuneSize,
    loss: Callable[[], torch.Tensor],
    optimizer: Any,
    hooks: AbstractContextManager[Any] | None = None,
    micro_batches: int = 1,
) -> None:
    """hooks: around each forward and backward."""

    def step() -> torch.Tensor:
        for _ in range(micro_batches):
            with hooks or nullcontext():
                found = loss()
                (found / micro_batches).backward()
        optimizer.step()
        optimizer.zero_grad()
        return found.detach()

    measured.facts["losses"] = time_steps(measured, step, size.steps, size.first_steps)
    measured.facts["tokens"] = size.tokens
    measured.facts["micro_batches"] = micro_batches


def measure_plain(sizes: Sizes, has_trl: bool = False) -> Measured:
    """has_trl: TRL's OffloadActivations moves what is saved, which is the inputs of the checkpointed blocks."""
    if has_trl:
        device.need_gpu("TRL takes streams of a GPU")
    size, measured = sizes.training.finetune, Measured()
    with simulated(sizes):
        peak, model = Peak(), make_model(sizes.training.finetune, size.layers)
        hooks = trl_offload.make_hooks([*model.parameters()]) if has_trl else None
        optimizer = torch.optim.AdamW(model.parameters(), RATE, fused=device.is_gpu())
        time_training(measured, size, make_loss(size, model, size.batch), optimizer, hooks)
        measured.facts["peak_bytes"] = peak.read()
    return measured


def measure_limited(
    sizes: Sizes, is_whole: bool = False, in_backward: bool = False, micro_batches: int = 1
) -> Measured:
    """is_whole: all the layers and the larger batch, which fit nowhere without it."""
    size = sizes.training.finetune
    layers, batch, limit = size.layers, size.batch, size.limit
    if is_whole:
        layers, batch, limit = size.all_layers, size.large_batch, size.all_layers_limit
    measured = Measured(facts={"limit_bytes": limit})
    with ebbtide.lms.enable(limit=limit, min_size=sizes.training.least_bytes):
        with device.HeldBytes() if device.is_gpu() else nullcontext() as held:
            model = make_model(size, layers)
            optimizer = torch.optim.AdamW(model.parameters(), RATE, fused=device.is_gpu())
            with ebbtide.lms.step_in_backward(optimizer) if in_backward else nullcontext():
                loss = make_loss(size, model, batch)
                time_training(measured, size, loss, optimizer, micro_batches=micro_batches)
        measured.facts |= {**ebbtide.lms.stats(), "parameters": sum(each.numel() for each in model.parameters())}
    measured.facts["driver_bytes"] = held.most_bytes() if held else 0
    most = max(measured.facts["peak_device_bytes"], measured.facts["driver_bytes"] / (1 + LIMIT_TOLERANCE))
    if most > limit:
        measured.faults.append(f"{most / MIB:.0f} MiB were held, and the limit is {limit / MIB:.0f} MiB")
    return measured


def measure_fsdp(sizes: Sizes) -> Measured:
    device.need_gpu("on the simulated device everything is on the CPU")
    from torch import distributed
    from torch.distributed import fsdp

    size, measured = sizes.training.finetune, Measured()
    distributed.init_process_group("cuda:nccl,cpu:gloo", store=distributed.HashStore(), rank=0, world_size=1)
    model = make_model(size, size.layers).cpu()
    gc.collect()
    torch.cuda.empty_cache()
    policies = {
        "offload_policy": fsdp.CPUOffloadPolicy(),
        "mp_policy": fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    }
    for layer in model.model.layers:
        fsdp.fully_shard(layer, **policies)
    fsdp.fully_shard(model, **policies)
    peak = Peak()
    optimizer = torch.optim.AdamW(model.parameters(), RATE, fused=True)
    time_training(measured, size, make_loss(size, model, size.batch), optimizer)
    measured.facts["peak_bytes"] = peak.read()
    distributed.destroy_process_group()
    return measured


def parts(sizes: Sizes) -> list[Part]:
    ways: dict[str, Callable[[Sizes], Measured]] = {
        "plain": measure_plain,
        "trl": partial(measure_plain, has_trl=True),
        "ebbtide": measure_limited,
        "in_backward": partial(measure_limited, in_backward=True),
        "fsdp": measure_fsdp,
        "all_layers": partial(measure_limited, is_whole=True),
        "accumulated": partial(measure_limited, is_whole=True, micro_batches=sizes.training.finetune.micro_batches),
    }
    return [Part(f"lms_finetune.{way}", measure) for way, measure in ways.items()]
