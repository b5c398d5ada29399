"""The rows of large model support. Each is held against its ideal: the bytes that it moved, hidden behind computing."""

from benchmarks import goals
from benchmarks.goals import at_least, at_most, median, shown
from benchmarks.row import Row
from benchmarks.sizes import Sizes


def ideal_of(part: str, plain: str) -> goals.Limit:
    """The time of a step that hides the bytes that `part` moved behind the forward and backward of `plain`."""
    steps = {metric: median(plain, metric, metric) for metric in ("forward", "backward", "rest")}
    moved = {
        direction: goals.scaled_to_fact("moved_bytes", part, "limits.link", direction, "X / L")
        for direction in ("to_host", "to_device")
    }
    forward = goals.of_all("max(forward, X / L)", max, steps["forward"], moved["to_host"])
    backward = goals.of_all("max(backward, X / L)", max, steps["backward"], moved["to_device"])
    return goals.of_all("ideal of these bytes", sum, forward, backward, steps["rest"])


def training_rows() -> list[Row]:
    """Each held against its ideal: the bytes that it moved, hidden behind forward and backward."""
    rows = [Row("training step", "plain", "lms_blocks.plain", "step", moves=0)]
    for share in Sizes().training.shares:
        workload = f"training step in {share} % of the memory"
        hooks = median(f"lms_blocks.hooks_{share}", "step", "hooks")
        for who in ("ebbtide", "hooks"):
            part = f"lms_blocks.{who}_{share}"
            ideal = ideal_of(part, "lms_blocks.plain")
            mine = (at_least(0.95, ideal), at_least(1, hooks)) if who == "ebbtide" else (shown(ideal),)
            rows.append(Row(workload, who, part, "step", mine, 0))
    for kind in ("checkpoint", "save_on_cpu", "trl"):
        rows.append(Row("training step in less memory", kind, f"lms_blocks.{kind}", "step", moves=0))
    checkpoint = (at_most(1.02, median("lms_blocks.checkpoint", "step", "checkpoint")),)
    both = "lms_blocks.ebbtide_checkpoint"
    rows.append(Row("checkpoints whose inputs leave", "ebbtide", both, "step", checkpoint, 0))
    return rows


def other_training_rows() -> list[Row]:
    """Of other models: large model support against the ideal, and its cost where everything fits."""
    rows = []
    for name, workload in (("resnet", "ResNet-152 in 16 GiB"), ("states", "AdamW in 60 % of the memory")):
        group = f"lms_{name}"
        rows.append(Row(workload, "plain, all memory", f"{group}.plain", "step", moves=0))
        ideal = ideal_of(f"{group}.ebbtide", f"{group}.plain")
        rows.append(Row(workload, "ebbtide", f"{group}.ebbtide", "step", (at_least(0.95, ideal),), 0))
    rows.append(Row(workload, "optimizer on the CPU", "lms_states.cpu", "step", moves=0))
    for model, target in (("blocks", 1.01), ("resnet", 1.01), ("small_net", 1.03)):
        plain = median(f"lms_fits.{model}", "plain", "plain")
        goal = (at_most(target, plain),)
        rows.append(Row(f"step of {model}, all fits", "ebbtide", f"lms_fits.{model}", "ebbtide", goal, 0))
    rows.append(Row("Trainer", "plain, all memory", "lms_trainer.plain", "step", moves=0))
    first, *_ = Sizes().training.trainer_limits
    for limit in Sizes().training.trainer_limits:
        part = f"lms_trainer.lms_{limit}"
        goal = (at_most(1.3, ideal_of(part, "lms_trainer.plain")),)
        rows.append(Row(f"Trainer in {limit} GiB", "ebbtide run --lms", part, "step", goal, 0))
    for way in ("split", "managed"):
        part = f"lms_trainer.{way}_{first}"
        rows.append(Row(f"Trainer in {first} GiB", f"ebbtide run --overflow {way}", part, "step", moves=0))
    return rows


def _best_within(name: str, share: int) -> goals.Limit:
    """The fastest of the checkpointed ways that fit into the share, and of evictions alone."""

    def seconds(entries: goals.Entries, _: int) -> float | None:
        limit = entries.get(f"lms_programs.{name}_plain", {}).get("facts", {}).get("peak_bytes", 0) * share / 100
        ways = [f"lms_programs.{name}_evict_{share}"]
        for stride in Sizes().training.strides:
            part = f"lms_programs.{name}_checkpoint_{stride}"
            facts = entries.get(part, {}).get("facts", {})
            if facts.get("peak_bytes", limit + 1) <= limit and not facts.get("is_out_of_memory"):
                ways.append(part)
        found = [goals.median_of(entries, part, "step") for part in ways]
        return min((value for value in found if value is not None), default=None)

    return goals.Limit("best of checkpoints that fit and evictions", seconds)


def program_rows() -> list[Row]:
    """Each held against the best that a user could choose by hand, and against all the memory."""
    rows = []
    size = Sizes().training
    for name in size.programs:
        plain = f"lms_programs.{name}_plain"
        rows.append(Row(f"{name}, all memory", "plain", plain, "step", moves=0))
        for stride in size.strides:
            part = f"lms_programs.{name}_checkpoint_{stride}"
            rows.append(Row(f"{name}, each {stride}. block checkpointed", "checkpoint", part, "step", moves=0))
        for share in size.program_shares:
            workload = f"{name} in {share} % of the memory"
            rows.append(Row(workload, "evictions", f"lms_programs.{name}_evict_{share}", "step", moves=0))
            mine = (at_most(1.05, _best_within(name, share)), shown(median(plain, "step", "plain")))
            rows.append(Row(workload, "auto", f"lms_programs.{name}_auto_{share}", "step", mine, 0))
    return rows


def parallel_rows() -> list[Row]:
    """Each held against checkpoints of all blocks, which may need less memory, or more."""
    rows = []
    for way, name in (("ddp", "DDP"), ("fsdp", "FSDP2")):
        group = f"lms_parallel.{way}"
        rows.append(Row(f"GPT on 2 GPUs, {name}, all memory", "plain", f"{group}_plain", "step", moves=0))
        checkpoint = f"{group}_checkpoint_1"
        rows.append(Row(f"GPT on 2 GPUs, {name}, checkpoints", "checkpoint", checkpoint, "step", moves=0))
        best = (shown(median(checkpoint, "step", "checkpoint")),)
        for share in Sizes().training.program_shares:
            workload = f"GPT on 2 GPUs, {name}, in {share} % of the memory"
            rows.append(Row(workload, "auto", f"{group}_auto_{share}", "step", best, 0))
    return rows


def largest_rows() -> list[Row]:
    """What fits is a fact of each; the figure is a step of it."""
    rows = []
    for what in ("batch", "pixels"):
        for who in ("plain", "ebbtide"):
            rows.append(
                Row(f"largest {what} of ResNet-152 in 16 GiB", who, f"lms_largest.{who}_{what}", "step", moves=0)
            )
    return rows


def finetune_rows() -> list[Row]:
    """The goals are those of the H100."""
    size = Sizes().training.finetune
    workload = f"fine-tuning {size.layers} layers of Qwen2.5-7B's shape"
    rows = [Row(f"{workload}, all memory", "plain", "lms_finetune.plain", "step", moves=0)]
    fsdp = (at_least(1, median("lms_finetune.fsdp", "step", "FSDP2")),)
    for who, part in (("ebbtide", "ebbtide"), ("ebbtide, step in backward", "in_backward")):
        rows.append(Row(f"{workload} in {size.limit // 10**9} GB", who, f"lms_finetune.{part}", "step", fsdp, 0))
    rows.append(Row(f"{workload}, weights and optimizer on the CPU", "FSDP2", "lms_finetune.fsdp", "step", moves=0))
    rows.append(Row(f"{workload}, activations on the CPU", "TRL", "lms_finetune.trl", "step", moves=0))
    whole = f"all {size.all_layers} layers"
    rows.append(Row(whole, "ebbtide", "lms_finetune.all_layers", "step", moves=0))
    accumulated = f"{whole}, {size.micro_batches} micro-batches"
    rows.append(Row(accumulated, "ebbtide", "lms_finetune.accumulated", "step", moves=0))
    return rows


def weight_rows() -> list[Row]:
    """Each held against its ideal: the weights that are not on the device come over the bus, hidden behind forward."""
    rows = [Row("forward pass", "plain", "lms_weights.plain", "forward", moves=0)]
    plain = median("lms_weights.plain", "forward", "forward")
    for share in Sizes().training.shares:
        others = [median(f"lms_weights.{who}_{share}", "forward", who) for who in ("hooks", "split")]
        for who in ("ebbtide", "hooks", "split"):
            part = f"lms_weights.{who}_{share}"
            moved = goals.scaled_to_fact("moved_bytes", part, "limits.link", "to_device", "X / L")
            ideal = goals.of_all("max(forward, X / L)", max, plain, moved)
            mine = (shown(ideal), *(at_least(1, other) for other in others)) if who == "ebbtide" else (shown(ideal),)
            rows.append(Row(f"forward pass in {share} % of the memory", who, part, "forward", mine, 0))
    return rows
