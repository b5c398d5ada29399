"""How much each workload moves: in full on a GPU, and small, as the benchmark's test of itself."""

import os
from dataclasses import dataclass, field
from typing import Any

MIB, GIB = 1 << 20, 1 << 30
Arguments = dict[str, Any]


@dataclass(frozen=True)
class ModelSize:
    """A Llama-like transformer and the input of one forward pass."""

    layers: int = 32
    hidden: int = 4096
    feed: int = 14336
    heads: int = 32
    key_value_heads: int = 8
    vocabulary: int = 128256
    batch: int = 2
    tokens: int = 4096


@dataclass(frozen=True)
class OverflowSize:
    """A device that is made small, what does not fit there, and the arguments of the programs in programs/.

    Attributes:
        limit_bytes: all that a program may have on the device.
        host_bytes: the bytes that a kernel reads from host memory.
        chunks_bytes: of host chunks that are made.
        weights_over: how much larger than the limit the weights are that tokens are generated with.
        generate, spike, small_steps, train: arguments of these programs.
        overhead_turns: of each small_steps process and metric, at most.
        jax_limit_bytes, jax_host_bytes: what JAX may have on the device, and on the host.
        jax_array_bytes: of arrays that together have 1.5 times the former.
    """

    limit_bytes: int
    host_bytes: int
    chunks_bytes: int
    weights_over: tuple[float, ...]
    generate: Arguments
    spike: Arguments
    small_steps: Arguments
    overhead_turns: int
    train: Arguments
    jax_limit_bytes: int
    jax_host_bytes: int
    jax_array_bytes: int


OVERFLOW = OverflowSize(
    limit_bytes=4 * GIB,
    host_bytes=2 * GIB,
    chunks_bytes=8 * GIB,
    weights_over=(0.1, 0.25, 0.5),
    generate={"width": 2048, "heads": 16, "vocabulary": 32000, "tokens": 8, "sequences": 3},
    spike={"narrow": 4096, "wide": 8192, "layers": 8, "batch": 256, "warm_steps": 5, "steps": 20, "wide_steps": 4},
    small_steps={"launches": 500, "allocations": 40, "allocation_bytes": 64 * MIB}
    | {"width": 2048, "layers": 8, "batch": 1024, "steps": 5},
    overhead_turns=12,
    train={"width": 4096, "layers": 8, "batch": 256, "steps": 5},
    jax_limit_bytes=2 * GIB,
    jax_host_bytes=4 * GIB,
    jax_array_bytes=128 * MIB,
)
SMALL_OVERFLOW = OverflowSize(
    limit_bytes=16 * MIB,
    host_bytes=16 * MIB,
    chunks_bytes=16 * MIB,
    weights_over=(0.25,),
    generate={"width": 256, "heads": 4, "vocabulary": 256, "tokens": 2, "sequences": 2},
    spike={"narrow": 256, "wide": 1024, "layers": 2, "batch": 4, "warm_steps": 1, "steps": 2, "wide_steps": 2},
    small_steps={"launches": 50, "allocations": 5, "allocation_bytes": MIB}
    | {"width": 32, "layers": 2, "batch": 4, "steps": 2},
    overhead_turns=2,
    train={"width": 32, "layers": 2, "batch": 4, "steps": 2},
    jax_limit_bytes=16 * MIB,
    jax_host_bytes=32 * MIB,
    jax_array_bytes=MIB,
)


@dataclass(frozen=True)
class ImagesSize:
    """A residual network, and the square images of one step."""

    blocks: tuple[int, ...]
    width: int
    batch: int
    pixels: int


@dataclass(frozen=True)
class FinetuneSize:
    """A language model of Qwen2.5's kind: some of its layers, and all of them with a larger batch."""

    hidden: int = 3584
    feed: int = 18944
    heads: int = 28
    key_heads: int = 4
    vocabulary: int = 152064
    tokens: int = 1024
    layers: int = 12
    batch: int = 8
    limit: int = 40_000_000_000
    all_layers: int = 28
    large_batch: int = 16
    all_layers_limit: int = 74_000_000_000
    micro_batches: int = 2  # where gradients are accumulated
    first_steps: int = 6
    steps: int = 6


def _library_programs() -> dict[str, Arguments]:
    """Models that other people wrote (library_programs.py)."""

    def transformers(kind: str, block: str, batch: int, length: int, **config: Any) -> Arguments:
        sizes = {"kind": kind, "block": block, "batch": batch, "length": length}
        return {"library": "transformers", **sizes, **config}

    def timm(name: str, block: str, batch: int, pixels: int = 224, **options: Any) -> Arguments:
        return {"library": "timm", "name": name, "block": block, "batch": batch, "pixels": pixels, **options}

    narrow = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 10, "num_attention_heads": 16}
    wide = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 16, "num_attention_heads": 16}
    bert = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
    gpt2 = {"n_embd": 1280, "n_layer": 24, "n_head": 20}
    t5 = {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12, "decoder_start_token_id": 0}
    mixtral = {"num_local_experts": 8, "num_key_value_heads": 4, "vocab_size": 32000}
    llama = {"num_key_value_heads": 4, "vocab_size": 32000}
    return {
        "hf_gpt2": transformers("GPT2LMHeadModel", "GPT2Block", 8, 1024, model_type="gpt2", **gpt2),
        "hf_llama": transformers("LlamaForCausalLM", "LlamaDecoderLayer", 8, 2048, model_type="llama", **wide, **llama),
        "hf_mixtral": transformers(
            "MixtralForCausalLM", "MixtralDecoderLayer", 8, 1024, model_type="mixtral", **narrow, **mixtral
        ),
        "hf_bert": transformers("BertForMaskedLM", "BertLayer", 48, 512, model_type="bert", **bert),
        "hf_t5": transformers("T5ForConditionalGeneration", "T5Block", 24, 512, model_type="t5", **t5),
        "timm_vit": timm("vit_large_patch16_224", "Block", 192),
        "timm_convnext": timm("convnext_base", "ConvNeXtBlock", 160),
        "timm_swin": timm("swin_base_patch4_window7_224", "SwinTransformerBlock", 128),
        "timm_efficientnet": timm("efficientnet_b4", "InvertedResidual", 96, 380),
        "timm_resnet": timm("resnet50", "Bottleneck", 384),
    }


@dataclass(frozen=True)
class TrainingSize:
    """Blocks of a transformer that are trained in less memory than they need.

    Attributes:
        shares: of the peak without a limit, in percent, that are the limits.
        ahead_bytes: the bytes that a user's hooks would load ahead of need.
        least_bytes: tensors with less storage stay on the device.
        states: a model in fp32 for AdamW, whose states are most of its memory.
        resnet: the network of examples/07_resnet152.py and its images.
        resnet_limit_bytes: the limit of its training.
        largest_from: where the search for the largest batch and images begins, and its steps.
        largest_host_limit_bytes: the host's limit for that.
        small_net: the same for a network whose operations take microseconds.
        fits_steps, fits_turns: of training where everything fits.
        trainer: the arguments of programs/trainer.py.
        trainer_limits: what that program may have on the device, in GiB.
        programs: the arguments of those in lms_programs.py.
        program_shares: of their peaks without a limit, in percent.
        strides: each first, second and so on of their blocks is checkpointed.
    """

    blocks: ModelSize = ModelSize(layers=8, batch=8)
    shares: tuple[int, ...] = (80, 60, 40)
    steps: int = 8
    ahead_bytes: int = 6 * GIB
    least_bytes: int = MIB
    states: ModelSize = ModelSize(layers=7, batch=1)
    resnet: ImagesSize = ImagesSize((3, 8, 36, 3), 64, 256, 224)
    resnet_limit_bytes: int = 16 * GIB
    largest_from: dict[str, tuple[int, int]] = field(default_factory=lambda: {"batch": (32, 16), "pixels": (224, 32)})
    largest_host_limit_bytes: int = 88 * GIB
    small_net: ImagesSize = ImagesSize((1, 1, 1, 1), 8, 16, 32)
    fits_steps: int = 6
    fits_turns: int = 5
    trainer: Arguments = field(
        default_factory=lambda: (
            {"hidden": 1536, "layers": 18, "heads": 12, "feed": 4096}
            | {"vocabulary": 32000, "tokens": 512, "batch": 8, "steps": 12}
        )
    )
    trainer_limits: tuple[int, ...] = (9, 6)
    programs: dict[str, Arguments] = field(
        default_factory=lambda: {
            "gpt": {"layers": 24, "width": 1280, "batch": 12, "length": 1024},
            "unet": {"width": 64, "levels": 5, "batch": 24, "pixels": 384},
            "experts": {"layers": 10, "width": 1024, "batch": 16, "length": 1024, "count": 8},
            "llama": {"layers": 16, "width": 2048, "batch": 8, "length": 2048},
            "padded": {"layers": 12, "width": 1024, "batch": 32, "length": 512},
            "vit": {"layers": 24, "width": 1024, "batch": 128, "pixels": 224},
            **_library_programs(),
        }
    )
    program_shares: tuple[int, ...] = (85, 70, 50)
    strides: tuple[int, ...] = (1, 2, 3, 4)
    finetune: FinetuneSize = FinetuneSize()


SMALL_TRAINING = TrainingSize(
    ModelSize(4, 128, 256, 4, 2, 256, 4, 64),
    (80, 60),
    4,
    64 << 10,
    16 << 10,
    states=ModelSize(2, 128, 256, 4, 2, 256, 1, 16),
    resnet=ImagesSize((1, 1, 1, 1), 8, 4, 32),
    resnet_limit_bytes=8 * MIB,  # of 28; what convolutions on the CPU take beside depends on the processor
    largest_from={"batch": (2, 2), "pixels": (32, 16)},
    largest_host_limit_bytes=16 * MIB,
    fits_steps=2,
    fits_turns=2,
    programs={
        "gpt": {"layers": 3, "width": 64, "batch": 2, "length": 64},
        "unet": {"width": 8, "levels": 2, "batch": 2, "pixels": 32},
        "experts": {"layers": 2, "width": 64, "batch": 2, "length": 64, "count": 4},
        "llama": {"layers": 3, "width": 128, "batch": 2, "length": 64},
        "padded": {"layers": 2, "width": 64, "batch": 4, "length": 64},
        "vit": {"layers": 3, "width": 64, "batch": 4, "pixels": 56},
    },
    program_shares=(70,),
    strides=(1, 2),
    finetune=FinetuneSize(64, 128, 4, 2, 256, 64, 3, 2, 3 * MIB, 4, 4, 5 * MIB, 2, 2),
)


@dataclass(frozen=True)
class TurnsSize:
    """A trainer's model and what its engine needs, on a device with room for the larger of the two and a little more.

    Attributes:
        turns: of a training step and a generation each.
        batch, tokens: of either.
        blocks_bytes: the engine's own memory, all of which it writes each turn.
        spare_bytes: of the device beyond what one of the two needs; less than the other one needs.
    """

    turns: int = 300
    width: int = 1024
    layers: int = 24
    heads: int = 16
    batch: int = 8
    tokens: int = 32
    blocks_bytes: int = 4 * GIB
    spare_bytes: int = 2 * GIB


@dataclass(frozen=True)
class Sizes:
    """Sizes are bytes unless the name says otherwise.

    Attributes:
        samples: how many times each operation is timed at least; twice as often where that is soon done.
        shown_samples: the same for a baseline that is shown for comparison only.
        patience_seconds: how long a part goes on after that.
        rest_seconds: before each operation of which driver calls are most. See workloads/no_backup.py.
        scale: of the rows of Llama-8B's matrices; 1 makes 290 tensors of 15 GiB.
        disk_scale: the same for what goes to disk.
        copied_bytes, thread_counts: what so many threads copy.
        tuned_bytes, tuned_thread_counts: the same, to choose the number of threads by.
        no_backup_tensors, no_backup_tensor_bytes: the tensors that a pause drops.
        link_bytes: one pinned copy.
        touched_bytes: of fresh host memory.
        host_copy_bytes: between a ring and host memory.
        handle_bytes: of the driver's handles among which the best is looked for.
        bare_handle_bytes: the same, by turns with a workload that is held against them.
        shared_bytes: that another process reads.
        exported_handle_bytes: of the bare calls beside that.
        two_in_turns: a trainer and an engine.
        curve_bytes: the sizes of the curve.
        small_tag_bytes: of tags whose pause is taken apart.
        baseline_curve_bytes: the same for baselines that no ratio refers to, whose first pause is slow.
        request_bytes, requests_in_flight: on the disk, for ebbtide and for its limit.
        activation_tokens, activation_blocks, malloc_steps, cold_steps: of allocation in a region.
    """

    samples: int = 5
    shown_samples: int = 2
    patience_seconds: float = 5
    rest_seconds: float = 0.3
    scale: float = 1.0
    disk_scale: float = 0.2
    copied_bytes: int = 2 * GIB
    thread_counts: tuple[int, ...] = (1, 2, 4, 8, 14)
    tuned_bytes: int = 8 * GIB
    tuned_thread_counts: tuple[int, ...] = (2, 4, 6, 8, 10, 12, 14, 16)
    no_backup_tensors: int = 40
    no_backup_tensor_bytes: int = GIB
    link_bytes: int = GIB
    touched_bytes: int = 2 * GIB
    host_copy_bytes: int = 8 * GIB
    handle_bytes: tuple[int, ...] = (32 * MIB, 64 * MIB, 128 * MIB, 256 * MIB, 512 * MIB, GIB)
    bare_handle_bytes: tuple[int, int] = (256 * MIB, GIB)
    shared_bytes: int = 15 * GIB
    exported_handle_bytes: tuple[int, ...] = (GIB, 2 * GIB)
    two_in_turns: TurnsSize = TurnsSize()
    curve_bytes: tuple[int, ...] = tuple(size * MIB for size in (2, 8, 32, 128, 512, 2048, 15360, 40960))
    baseline_curve_bytes: tuple[int, ...] = tuple(size * MIB for size in (2, 8, 32, 128, 512, 2048))
    small_tag_bytes: tuple[int, ...] = (2 * MIB, 32 * MIB, 128 * MIB)
    request_bytes: int = 8 * MIB
    requests_in_flight: int = min(8, len(os.sched_getaffinity(0)))
    activation_tokens: int = 4096
    activation_blocks: int = 32
    malloc_steps: int = 200
    cold_steps: int = 10
    model: ModelSize = ModelSize()
    overflow: OverflowSize = OVERFLOW
    training: TrainingSize = TrainingSize()

    @classmethod
    def small(cls, samples: int = 2) -> "Sizes":
        """Some MiB each: fits the simulated device, and says nothing about speed."""
        return cls(
            samples=samples,
            rest_seconds=0,
            scale=0.001,
            disk_scale=0.001,
            copied_bytes=16 * MIB,
            thread_counts=(1, 2),
            tuned_bytes=16 * MIB,
            tuned_thread_counts=(1, 2),
            no_backup_tensors=4,
            no_backup_tensor_bytes=8 * MIB,
            link_bytes=8 * MIB,
            touched_bytes=32 * MIB,
            host_copy_bytes=16 * MIB,
            handle_bytes=(2 * MIB, 8 * MIB),
            bare_handle_bytes=(2 * MIB, 8 * MIB),
            shared_bytes=8 * MIB,
            exported_handle_bytes=(2 * MIB, 4 * MIB),
            two_in_turns=TurnsSize(3, 256, 2, 4, 2, 8, 8 * MIB, 4 * MIB),
            curve_bytes=(2 * MIB, 16 * MIB),
            baseline_curve_bytes=(2 * MIB,),
            small_tag_bytes=(2 * MIB,),
            requests_in_flight=2,
            activation_tokens=16,
            activation_blocks=2,
            malloc_steps=5,
            cold_steps=2,
            model=ModelSize(2, 64, 128, 4, 2, 256, 1, 16),
            overflow=SMALL_OVERFLOW,
            training=SMALL_TRAINING,
        )
