"""The rows of the table: the figures of the parts, and their targets on one H200 with 16 cores."""

import itertools
from typing import Any

from benchmarks import goals, lms_rows, provenance
from benchmarks.goals import Entries, Goal, at_least, at_most, driver_calls, link, median, shown, stretch
from benchmarks.row import Row
from benchmarks.sizes import MIB, Sizes

T = "torch_memory_saver"
BASELINES = (T, "vllm_sleep", "plain_copy")
DROP_IN = "ebbtide, torch_memory_saver's calls"
HOST_CHUNKS = "host_chunks.ebbtide"
TO_HOST, TO_DEVICE = link("to_host"), link("to_device")


POLICIES, OFFLOADS = ("split", "managed", "whole"), ("offload", "offload_pinned")


def baselines(workload: str, group: str, metric: str, limit: goals.Limit) -> list[Row]:
    return [Row(workload, name, f"{group}.{name}", metric, (shown(limit),)) for name in BASELINES]


def drop_in(workload: str, group: str, metric: str, of: str) -> Row:
    """The saver through torch_memory_saver's calls: at most 2 % slower than the saver itself."""
    same, compared = median(f"{group}.{of}", metric, "saver"), median(f"{group}.{T}", metric, "T")
    return Row(workload, DROP_IN, f"{group}.ebbtide_tms", metric, (at_most(1.02, same), shown(compared)))


def first_pause_rows() -> list[Row]:
    pause, resume = "first pause", "resume, host memory given back"
    pause_goals = (
        at_least(8, median(f"first_pause.{T}", "pause", "T")),
        at_least(0.45, TO_HOST),
        stretch(0.6, TO_HOST),
    )
    resume_goals = (at_least(4, median(f"first_pause.{T}", "resume", "T")), at_least(0.9, TO_DEVICE))
    return [
        Row(pause, "ebbtide", "first_pause.ebbtide", "pause", pause_goals),
        drop_in(pause, "first_pause", "pause", "ebbtide"),
        *baselines(pause, "first_pause", "pause", TO_HOST),
        Row("prepare, ahead of the first pause", "ebbtide", "prepared_pause.ebbtide", "prepare"),
        Row("first pause after prepare", "ebbtide", "prepared_pause.ebbtide", "pause", (at_least(0.9, TO_HOST),)),
        Row(resume, "ebbtide", "first_pause.ebbtide", "resume", resume_goals),
        drop_in(resume, "first_pause", "resume", "ebbtide"),
        *baselines(resume, "first_pause", "resume", TO_DEVICE),
    ]


def steady_rows() -> list[Row]:
    rows = []
    for metric, limit in (("pause", TO_HOST), ("resume", TO_DEVICE)):
        workload = f"steady {metric}"
        for kind in ("retain", "pinned"):
            goal = at_least(0.98, limit)
            compared = shown(median(f"steady.{T}", metric, "T"))
            rows.append(Row(workload, f"ebbtide, {kind}", f"steady.ebbtide_{kind}", metric, (goal, compared)))
        rows.append(drop_in(workload, "steady", metric, "ebbtide_pinned"))
        rows += baselines(workload, "steady", metric, limit)
    return rows


def unchanged_rows() -> list[Row]:
    read = goals.scaled("limits.device_read", "read", "one read on the device")
    bound = goals.of_all("2 D + one read on the device", sum, driver_calls("unchanged.ebbtide", "give", 2), read)
    nothing = (at_most(1, bound), at_least(12, median(f"steady.{T}", "pause", "T")))
    tenth = (at_most(0.2, median("steady.ebbtide_retain", "pause", "steady pause")),)
    return [
        Row("pause, nothing changed", "ebbtide, retain", "unchanged.ebbtide", "pause", nothing),
        Row("pause, a tenth changed", "ebbtide, retain", "unchanged.tenth_changed", "pause", tenth),
    ]


def copy_ahead_rows() -> list[Row]:
    read = goals.scaled("limits.device_read", "read", "one read on the device")
    bound = goals.of_all("2 D + one read on the device", sum, driver_calls("copy_ahead.ebbtide", "give", 2), read)
    first = median(f"first_pause.{T}", "pause", "T")
    alone = median("copy_ahead.beside", "forward", "forward alone")
    return [
        Row("copy ahead of the first pause", "ebbtide", "copy_ahead.ebbtide", "copy_ahead"),
        Row("first pause after that", "ebbtide", "copy_ahead.ebbtide", "pause", (at_most(1, bound), shown(first)), 0),
        Row(
            "forward pass beside copies ahead",
            "ebbtide",
            "copy_ahead.beside",
            "forward_beside",
            (at_most(1.03, alone),),
        ),
    ]


def no_backup_rows() -> list[Row]:
    rows = []
    for metric, kind in (("pause", "give"), ("resume", "claim")):
        workload = f"{metric}, 40 tensors without backup"
        bare = driver_calls("no_backup.ebbtide", kind)  # type: ignore[arg-type]
        own = (at_most(1.1, bare), at_most(1, median(f"no_backup.{T}", metric, "T")))
        rows.append(Row(workload, "ebbtide", "no_backup.ebbtide", metric, own))
        rows.append(drop_in(workload, "no_backup", metric, "ebbtide"))
        rows += [Row(workload, name, f"no_backup.{name}", metric, (Goal("<=", None, bare),)) for name in BASELINES[:2]]
    return rows


def swap_rows() -> list[Row]:
    rows = []
    duplex = goals.scaled("limits.link", "both", "duplex link")
    for kind in ("retain", "pinned"):
        part = f"swap.ebbtide_{kind}"
        goals_of = (at_least(1.7, median(part, "pause_then_resume", "pause, then resume")), at_least(0.85, duplex))
        rows.append(Row("swap of two tags", f"ebbtide, {kind}", part, "swap", goals_of, moves=2))
        rows.append(Row("the same by pause, then resume", f"ebbtide, {kind}", part, "pause_then_resume", moves=2))
    return rows


def overlap_rows() -> list[Row]:
    claim = driver_calls("early_kernel.small_first", "claim")
    forward = median("forward.ebbtide", "forward", "forward alone")
    ideal = goals.of_all("max(forward, bytes / L)", max, forward, TO_DEVICE)
    large_part = "early_kernel.large_first"
    first = goals.scaled_to_fact("first_bytes", large_part, "limits.link", "to_device", "first_bytes / L")
    small = (at_most(1.3, claim),)
    large = (Goal("<=", None, goals.of_all("D + first tensor / L", sum, claim, first)),)
    attached = (at_least(0.9, ideal),)
    early = "resume(wait=False), first kernel"
    return [
        *swap_rows(),
        Row(early, "ebbtide, 8 KiB first", "early_kernel.small_first", "first_kernel", small, moves=0),
        Row(
            early,
            "ebbtide, 8 KiB first, memory that others had meanwhile",
            "early_kernel.small_first",
            "first_kernel_after_others",
            moves=0,
        ),
        Row(early, "ebbtide, 1 GiB first", large_part, "first_kernel", large, moves=0),
        Row("resume with attach, forward", "ebbtide, retain", "forward.ebbtide", "attached", attached, moves=0),
        Row("resume, then forward", "ebbtide, retain", "forward.ebbtide", "resume_then_forward", (shown(ideal),), 0),
        Row("forward alone", "torch", "forward.ebbtide", "forward", moves=0),
    ]


def two_process_rows() -> list[Row]:
    shared = "until another process reads it"
    rows = [
        Row(f"{what}, {shared}", "ebbtide", f"share.{part}", "read", (*goal, shown(bare(f"share.{part}"))), 0)
        for part, what, goal in (
            ("share", "saver.share of 15 GiB", (at_most(1, goals.fixed(0.010)),)),
            ("queue", "torch's queue of 15 GiB", ()),
        )
    ]
    in_turn = "pause there, then resume here"
    duplex = goals.scaled("limits.link", "both", "duplex link")
    for part, what, moves in (
        ("no_backup", "40 GiB without backup", 0),
        ("cleared", "40 GiB without backup, cleared", 0),
        ("ram", "15 GiB both ways, ram", 2),
        ("pinned", "15 GiB both ways, pinned", 2),
    ):
        name, workload = f"hand_over.{part}", f"hand-over, {what}"
        calls = goals.of_all("2 D", sum, driver_calls(name, "claim"), driver_calls(name, "give"))
        limit, turned = duplex if moves else calls, median(name, "pause_then_resume", in_turn)
        target = at_least(1.7, turned) if moves else at_most(0.3, turned)
        wanted = Goal(">=", None, turned) if part == "cleared" else target
        rows.append(Row(workload, "ebbtide", name, "hand_over", (wanted, shown(limit)), moves))
        rows.append(Row(workload, f"ebbtide, {in_turn}", name, "pause_then_resume", (shown(limit),), moves))
    rows.append(Row("a turn of trainer and engine", "ebbtide", "trainer_and_engine.turns", "turn", moves=0))
    return rows


def bare(part: str) -> goals.Limit:
    """Export, import and map by bare calls, at the handle size that is best for them."""

    def seconds(entries: Entries, _: int) -> float | None:
        metrics = [metric for metric in entries.get(part, {}).get("seconds", ()) if metric.startswith("bare ")]
        medians = [found for metric in metrics if (found := goals.median_of(entries, part, metric)) is not None]
        return min(medians, default=None)

    return goals.Limit("bare calls", seconds)


def other_rows() -> list[Row]:
    rows = []
    for metric, request in (("pause", "write"), ("resume", "read")):
        direct = goals.scaled("limits.direct_io", request, "plain O_DIRECT")
        rows.append(Row(f"{metric}, disk", "ebbtide", "disk.ebbtide", metric, (at_least(0.9, direct),)))
    for kind, target in (("warm", 1.05), ("cold", None)):
        default = median("malloc.ebbtide", f"{kind}_default", "torch's default allocator")
        goal = Goal("<=", target, default)
        rows.append(Row(f"malloc and free, {kind}", "ebbtide", "malloc.ebbtide", f"{kind}_region", (goal,), 0))
    rows.append(Row("enter and leave a region", "ebbtide", "malloc.ebbtide", "enter_and_leave", moves=0))
    rows.append(Row("import without torch", "ebbtide", "hidden_costs.import", "import", moves=0))
    return rows


def thread_rows() -> list[Row]:
    parts = [("threads", count) for count in Sizes.thread_counts]
    parts += [("copy_tuning", count) for count in Sizes.tuned_thread_counts]
    rows = []
    for kind in ("fresh", "kept"):
        for metric, limit in (("pause", TO_HOST), ("resume", TO_DEVICE)):
            for group, count in parts:
                who = f"ebbtide, {count} threads"
                workload = f"{metric}, {kind} host memory"
                rows.append(Row(workload, who, f"{group}.{count}", f"{kind}_{metric}", (shown(limit),)))
    return rows


def overflow_rows() -> list[Row]:
    zero_copy = goals.scaled("limits.zero_copy", "read", "zero copy")
    host = (at_least(1, goals.rate(50)), shown(zero_copy), shown(TO_DEVICE))
    half = (at_least(1, goals.rate(98)),)
    fresh = shown(median(HOST_CHUNKS, "fresh", "made anew"))
    return [
        Row("kernel reads what spilled", "ebbtide, all on the host", "overflow_read.host", "read", host),
        Row("kernel reads what spilled", "ebbtide, half of it", "overflow_read.half", "read", half),
        Row("kernel writes what spilled", "ebbtide, all on the host", "overflow_read.host", "write", (shown(TO_HOST),)),
        Row("kernel writes what spilled", "ebbtide, half of it", "overflow_read.half", "write"),
        Row("spill, host chunks made anew", "ebbtide", HOST_CHUNKS, "fresh"),
        Row("spill, host chunks from the pool", "ebbtide", HOST_CHUNKS, "from_pool", (fresh,)),
        Row("filling the pool", "ebbtide", HOST_CHUNKS, "fill_pool"),
    ]


def spike_rows() -> list[Row]:
    rows = []
    whos = {
        "kept": "ebbtide run",
        "emptied": "ebbtide run, cache emptied",
        "region": "ebbtide, regions that are trimmed",
        "one_region": "ebbtide, one region",
    }
    for name, who in whos.items():
        part = f"run_spike.{name}"
        after = Goal("<=", 1.02, median(part, "before", "before the spike"))
        plain = Goal("<=", None, median(part, "plain_spike", "where it fits"))
        rows += [
            Row("training step before a spike", who, part, "before", moves=0),
            Row("training step of a spike", who, part, "spike", (plain,), 0),
            Row("training step after a spike", who, part, "after", (after,), 0),
        ]
    return rows


def generating(who: str, over: float) -> str:
    """The part's name, such as run_generate.split_25."""
    return f"run_generate.{who}_{round(100 * over)}"


def generate_rows() -> list[Row]:
    """Each held against reading what exceeds the limit over the bus, once a token."""
    rows = []
    for over in Sizes().overflow.weights_over:
        offload = median(generating("offload", over), "token", "offload")
        for who in (*POLICIES, *OFFLOADS, "fits"):
            part = generating(who, over)
            bus = goals.scaled_to_fact("over_bytes", part, "limits.zero_copy", "read", "excess / zero copy")
            mine = (shown(bus), shown(offload)) if who in POLICIES else (shown(bus),) if who in OFFLOADS else ()
            name = f"ebbtide, {who}" if who in POLICIES else who
            rows.append(Row(f"a token, weights {over:.0%} over", name, part, "token", mine, 0))
    return rows


def run_rows() -> list[Row]:
    rows = []
    for metric, what in (("launch", "launch"), ("allocation", "cuMemAlloc and free"), ("step", "training step")):
        workload = f"{what}, all fits"
        part = "run_overhead.turns"
        plain = goals.least(part, f"{metric} plain", "without ebbtide, least of each")
        rows.append(Row(workload, "without ebbtide", part, f"{metric} plain", (), 0))
        for way, who, target in (("run", "ebbtide run", 1.01), ("pauseable", "ebbtide run --pauseable", None)):
            rows.append(Row(workload, who, part, f"{metric} {way}", (Goal("<=", target, plain),), 0, "least"))
    for metric, limit in (("pause", TO_HOST), ("resume", TO_DEVICE)):
        workload = f"{metric} of a whole program"
        rows.append(Row(workload, "ebbtide run --pauseable", "run_pauseable.ebbtide", metric, (shown(limit),)))
    return rows


SMALL_TAG_VARIANTS = (
    *("whole", "without digests", "without looking at torch", "in the core alone"),
    *("of what is paused", "of what is resident", "by bare calls"),
)


def small_tag_rows() -> list[Row]:
    rows = []
    for size, metric in itertools.product(Sizes.small_tag_bytes, ("pause", "resume")):
        part = f"small_tags.ebbtide_{size}"
        bare = median(part, f"{metric} by bare calls", "bare calls")
        for variant in SMALL_TAG_VARIANTS:
            if variant == ("of what is resident" if metric == "pause" else "of what is paused"):
                continue
            who = "driver" if variant == "by bare calls" else f"ebbtide, {variant}"
            is_held = variant == "whole" and size == Sizes.small_tag_bytes[0]
            wanted = (at_most(1, goals.fixed(0.0003)), shown(bare)) if is_held else (shown(bare),)
            rows.append(Row(f"{metric}, {size // MIB} MiB", who, part, f"{metric} {variant}", wanted, 0))
    return rows


def curve_rows() -> list[Row]:
    rows = []
    for size in Sizes.curve_bytes:
        for metric in ("pause", "resume"):
            name = f"{metric} {size}"
            compared, bare = median(f"curve.{T}", name, "T"), median("curve.vllm_sleep", name, "copy and bare calls")
            for kind in ("retain", "pinned"):
                wanted = [at_most(1, compared)]
                if size in Sizes.baseline_curve_bytes:
                    wanted.append(at_most(1.25, bare) if size == 32 * MIB else Goal("<=", None, bare))
                workload = f"{metric}, {size // MIB} MiB"
                part = f"curve.ebbtide_{kind}"
                rows.append(Row(workload, f"ebbtide, {kind}", part, name, tuple(wanted), 0, is_of_full_size=True))
    return rows


ROWS = (
    *first_pause_rows(),
    *steady_rows(),
    *unchanged_rows(),
    *copy_ahead_rows(),
    *no_backup_rows(),
    *overlap_rows(),
    *other_rows(),
    *thread_rows(),
    *small_tag_rows(),
    *two_process_rows(),
    *curve_rows(),
    *overflow_rows(),
    *spike_rows(),
    *generate_rows(),
    *run_rows(),
    *lms_rows.training_rows(),
    *lms_rows.other_training_rows(),
    *lms_rows.weight_rows(),
    *lms_rows.largest_rows(),
    *lms_rows.program_rows(),
    *lms_rows.parallel_rows(),
    *lms_rows.finetune_rows(),
)


def judge(entries: Entries) -> list[dict[str, Any]]:
    """Every row whose part was run, as plain values."""
    return [judge_row(row, entries) for row in ROWS if was_run(row, entries)]


def was_run(row: Row, entries: Entries) -> bool:
    entry = entries.get(row.part)
    if entry is None or not row.is_of_full_size:
        return entry is not None
    return entry["status"] != "ok" or row.metric in entry["seconds"]


def judge_row(row: Row, entries: Entries) -> dict[str, Any]:
    """Seconds are those of `provenance.summarize`. A row whose part failed, or whose bytes were wrong, has no ratio."""
    entry = entries[row.part]
    judged: dict[str, Any] = {
        "workload": row.workload,
        "who": row.who,
        "part": row.part,
        "metric": row.metric,
        "status": entry["status"],
        "reason": entry.get("reason", ""),
        "goals": [],
    }
    values = entry.get("seconds", {}).get(row.metric)
    if entry["status"] != "ok" or not values:
        return judged
    if entry["faults"]:
        judged |= {"status": "wrong", "reason": "; ".join(dict.fromkeys(entry["faults"]))}
    summary = provenance.summarize(values)
    cpu = entry.get("cpu_seconds", {}).get(row.metric)
    judged["seconds"] = summary
    judged["cpu_seconds"] = provenance.summarize(cpu)["median"] if cpu else None
    judged["bytes"] = row.moves * entry["bytes"]
    judged["bytes_per_second"] = judged["bytes"] / summary["median"] if judged["bytes"] else None
    if judged["status"] == "ok":
        judged["goals"] = [goal.judge(entries, entry["bytes"], float(summary[row.statistic])) for goal in row.goals]
    return judged
