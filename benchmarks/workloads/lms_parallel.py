"""A GPT that two GPUs train, data parallel: DDP, and FSDP2 in bf16, in less memory than each of them needs.

Plain, with every block checkpointed, and under large model support.
"""

import gc
import multiprocessing
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import ebbtide
import torch
from ebbtide import saver
from ebbtide.lms import calls
from torch import distributed, nn
from torch.distributed import fsdp

from benchmarks import device, lms_programs
from benchmarks.lms_training import PLANNED_AFTER, Peak, simulated
from benchmarks.measured import Measured, Part, SkippedError
from benchmarks.sizes import Sizes
from benchmarks.workloads.lms_programs import LOSSES, check, count_flushes, run

RANKS = 2
PATIENCE = timedelta(seconds=120)  # of a rank whose other one has failed
PROGRAM = "gpt"


def make_program(sizes: Sizes, way: str, rank: int, stride: int = 0) -> lms_programs.Program:
    """Of one micro-batch, which is another one on each rank."""
    program = lms_programs.make(PROGRAM, sizes.training.programs[PROGRAM])
    if stride:
        program.checkpoint_each(stride)
    model, batch, program.accumulates = program.model, program.batch, 1
    if way == "ddp":
        wrapped: nn.Module = nn.parallel.DistributedDataParallel(model)
    else:
        mixed = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in program.blocks:
            fsdp.fully_shard(block, mp_policy=mixed)
        wrapped, program.is_mixed = fsdp.fully_shard(model, mp_policy=mixed), False
        program.optimizer = lms_programs.make_adamw(model)
    program.loss = lambda words: lms_programs.language_loss(wrapped(words), words)
    program.batch = lambda number: batch(number * RANKS + rank)
    return program


def train_plain(sizes: Sizes, way: str, stride: int, rank: int) -> Measured:
    measured = Measured()
    with simulated(sizes):
        peak = Peak()
        run(measured, make_program(sizes, way, rank, stride), 3, sizes.training.steps)
        measured.facts["peak_bytes"] = peak.read()
    return measured


def train_limited(sizes: Sizes, way: str, share: int, rank: int) -> Measured:
    with simulated(sizes):
        peak = Peak()
        losses = run(Measured(), make_program(sizes, way, rank), LOSSES, 0)
        needs: list[Any] = [None] * RANKS
        distributed.all_gather_object(needs, peak.read())
    limit = max(needs) * share // 100
    gc.collect()
    device.empty_cache()
    measured = Measured(facts={"needed_bytes": max(needs), "limit_bytes": limit})
    with ebbtide.lms.enable(limit=limit, min_size=sizes.training.least_bytes):
        program = make_program(sizes, way, rank)
        with device.HeldBytes() if device.is_gpu() else nullcontext() as held:  # which costs time
            found = run(measured, program, PLANNED_AFTER, 0)
        flushes = count_flushes()
        run(measured, program, 0, sizes.training.steps)
        measured.facts |= {**ebbtide.lms.stats(), "recomputed": len(calls.recomputed())}
        measured.facts["flushes"] = count_flushes() - flushes
        measured.facts["choices"] = [line for line in ebbtide.lms.report().splitlines() if line.startswith("steps ")]
        measured.facts["driver_bytes"] = held.most_bytes() if held else 0
    check(measured, losses, found[:LOSSES])
    return measured


def run_rank(train: Callable[..., Measured], rendezvous: str, rank: int) -> Measured:
    torch.set_num_threads(1)
    if device.is_gpu():
        torch.cuda.set_device(rank)
    distributed.init_process_group(
        "nccl" if device.is_gpu() else "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=RANKS,
        timeout=PATIENCE,
    )
    try:
        return train(rank=rank)
    finally:
        distributed.destroy_process_group()


def measure(sizes: Sizes, train: Callable[..., Measured], **options: Any) -> Measured:
    """That of the first rank, with the faults and some facts of all: the slowest one decides."""
    if saver.device == "cuda" and torch.cuda.device_count() < RANKS:
        raise SkippedError(f"needs {RANKS} GPUs")
    spawning = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(RANKS, spawning) as ranks:
        start = partial(run_rank, partial(train, sizes, **options), str(Path(folder, "rendezvous")))
        measured, *others = ranks.map(start, range(RANKS))
    measured.faults += [f"another rank: {fault}" for other in others for fault in other.faults]
    for rank, other in enumerate(others, 1):
        found = other.facts.keys() & {"flushes", "choices", "recomputed", "evicted_bytes", "streamed_bytes"}
        measured.facts |= {f"{name}_of_rank_{rank}": other.facts[name] for name in sorted(found)}
    return measured


def parts(sizes: Sizes) -> list[Part]:
    found = []
    for way in ("ddp", "fsdp"):
        for name, stride in (("plain", 0), ("checkpoint_1", 1)):
            found.append(
                Part(f"lms_parallel.{way}_{name}", partial(measure, train=train_plain, way=way, stride=stride))
            )
        for share in sizes.training.program_shares:
            limited = partial(measure, train=train_limited, way=way, share=share)
            found.append(Part(f"lms_parallel.{way}_auto_{share}", limited))
    return found
