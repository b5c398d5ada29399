"""Targets that are judged from the figures of one run, and of several merged runs."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def importable(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(root)


def entry(size_bytes: int = 0, faults: Sequence[str] = (), **seconds: list[float]) -> dict[str, Any]:
    figures = {name.replace("__", " "): values for name, values in seconds.items()}
    return {"status": "ok", "bytes": size_bytes, "seconds": figures, "facts": {}, "faults": list(faults)}


def judged(entries: dict[str, Any], part: str, metric: str) -> dict[str, Any]:
    from benchmarks.rows import judge

    (row,) = [row for row in judge(entries) if (row["part"], row["metric"]) == (part, metric)]
    return row


def ratios(row: dict[str, Any]) -> list[tuple[float | None, bool | None]]:
    return [(goal["ratio"] and round(goal["ratio"], 3), goal["reached"]) for goal in row["goals"]]


LINK = {"limits.link": entry(100, to_host=[1, 1, 9], to_device=[2], both=[2.5])}


def test_speeds_are_judged_against_link_and_baseline() -> None:
    entries = {
        **LINK,
        "first_pause.ebbtide": entry(1000, pause=[20, 20, 21], resume=[10]),
        "first_pause.torch_memory_saver": entry(1000, pause=[200], resume=[50]),
    }
    pause = judged(entries, "first_pause.ebbtide", "pause")
    assert ratios(pause) == [(10, True), (0.5, True), (0.5, False)]
    assert pause["goals"][2]["is_stretch"] and pause["bytes_per_second"] == 50
    assert ratios(judged(entries, "first_pause.ebbtide", "resume")) == [(5, True), (2, True)]
    del entries["first_pause.torch_memory_saver"]
    assert ratios(judged(entries, "first_pause.ebbtide", "pause"))[0] == (None, None)


def test_the_drop_in_may_be_two_percent_slower_than_the_saver() -> None:
    entries = {
        "first_pause.ebbtide": entry(1000, pause=[10], resume=[10]),
        "first_pause.ebbtide_tms": entry(1000, pause=[10.1], resume=[10.3]),
    }
    assert ratios(judged(entries, "first_pause.ebbtide_tms", "pause")) == [(1.01, True), (None, None)]
    assert ratios(judged(entries, "first_pause.ebbtide_tms", "resume")) == [(1.03, False), (None, None)]


def test_times_are_judged_against_driver_calls_at_the_best_handle_size() -> None:
    calls = {"give__2_MiB": [9], "give__64_MiB": [3, 3], "claim__2_MiB": [4], "claim__64_MiB": [5]}
    entries = {"no_backup.ebbtide": entry(1000, pause=[3.3], resume=[4.8], **calls)}
    assert ratios(judged(entries, "no_backup.ebbtide", "pause"))[0] == (1.1, True)
    assert ratios(judged(entries, "no_backup.ebbtide", "resume"))[0] == (1.2, False)
    entries |= {
        "limits.device_read": entry(1000, read=[1]),
        "unchanged.ebbtide": entry(1000, pause=[14], **calls),
        "early_kernel.small_first": entry(1000, first_kernel=[4.4], **calls),
        "steady.torch_memory_saver": entry(1000, pause=[100]),
    }
    assert ratios(judged(entries, "unchanged.ebbtide", "pause")) == [(2, False), (7.143, False)]
    assert ratios(judged(entries, "early_kernel.small_first", "first_kernel")) == [(1.1, True)]


def test_overlap_is_judged_against_what_it_overlaps() -> None:
    entries = {
        **LINK,
        "swap.ebbtide_retain": entry(1000, swap=[25], pause_then_resume=[40]),
        "forward.ebbtide": entry(1000, attached=[25], forward=[18], resume_then_forward=[38]),
    }
    swap = judged(entries, "swap.ebbtide_retain", "swap")
    assert ratios(swap) == [(1.6, False), (1, True)] and swap["bytes_per_second"] == 80
    assert ratios(judged(entries, "forward.ebbtide", "attached")) == [(0.8, False)]


def test_overflow_is_judged_against_rates_and_what_one_would_do_otherwise() -> None:
    gigabyte = 10**9
    entries = {
        **LINK,
        "limits.zero_copy": entry(52 * gigabyte, read=[1]),
        "overflow_read.host": entry(51 * gigabyte, read=[1]),
        "overflow_read.half": entry(96 * gigabyte, read=[1]),
        "run_spike.kept": entry(before=[2], spike=[30], after=[2.02], plain_spike=[10]),
        "run_generate.split_25": {**entry(token=[0.25]), "facts": {"over_bytes": 104 * gigabyte // 10}},
        "run_generate.offload_25": entry(token=[1]),
        "run_overhead.turns": entry(launch__plain=[1.0, 1.3, 1.4], launch__run=[1.5, 1.02, 1.3]),
    }
    assert ratios(judged(entries, "overflow_read.host", "read"))[:2] == [(1.02, True), (0.981, None)]
    assert ratios(judged(entries, "overflow_read.half", "read")) == [(0.98, False)]
    assert ratios(judged(entries, "run_spike.kept", "after")) == [(1.01, True)]
    assert ratios(judged(entries, "run_spike.kept", "spike")) == [(3, None)]
    assert ratios(judged(entries, "run_generate.split_25", "token")) == [(0.8, None), (4, None)]
    assert ratios(judged(entries, "run_overhead.turns", "launch run")) == [(1.02, False)]
    entries["run_overhead.turns"] = entry(launch__plain=[1.0, 1.3, 1.4], launch__run=[1.5, 1.01, 1.6])
    assert ratios(judged(entries, "run_overhead.turns", "launch run")) == [(1.01, True)]
    assert ratios(judged(entries, "run_overhead.turns", "launch plain")) == []


def test_a_wrong_or_missing_figure_is_compared_with_nothing() -> None:
    entries = {**LINK, "steady.ebbtide_retain": entry(1000, ["a tensor's bytes changed"], pause=[1])}
    row = judged(entries, "steady.ebbtide_retain", "pause")
    assert row["status"] == "wrong" and row["goals"] == [] and row["reason"] == "a tensor's bytes changed"
    entries["unchanged.tenth_changed"] = entry(1000, pause=[1])
    assert ratios(judged(entries, "unchanged.tenth_changed", "pause")) == [(None, None)]
    entries["steady.ebbtide_retain"] = {"status": "failed", "reason": "lost"}
    row = judged(entries, "steady.ebbtide_retain", "pause")
    assert (row["status"], row["reason"]) == ("failed", "lost") and "seconds" not in row


def run_of(revision: str = "r", **measured: Any) -> dict[str, Any]:
    from benchmarks.merging import SAME

    origin = {**dict.fromkeys(SAME, "same"), "revision": revision, "when": len(measured)}
    entries = {name.replace("__", "."): part for name, part in measured.items()}
    return {"provenance": origin, "result": {"is_small": False, "rows": [], "measured": entries}}


def test_merged_figures_are_held_against_their_own_run_s_limits_where_there_are_any() -> None:
    from benchmarks.merging import merge

    slow_link = entry(100, to_host=[10], to_device=[10], both=[10])
    baseline = entry(1000, pause=[300], resume=[300])
    one = run_of(limits__link=LINK["limits.link"], steady__ebbtide_retain=entry(1000, pause=[10]))
    other = run_of(
        limits__link=slow_link, steady__torch_memory_saver=baseline, swap__ebbtide_retain=entry(1000, swap=[100])
    )
    merged = merge([one, other])
    row, swap = (
        next(row for row in merged["result"]["rows"] if row["part"] == part and "seconds" in row)
        for part in ("steady.ebbtide_retain", "swap.ebbtide_retain")
    )
    assert ratios(row) == [(1, True), (30, None)] and row["run"] == 0
    assert [goal.get("is_other_run", False) for goal in row["goals"]] == [False, True]
    assert swap["run"] == 1 and swap["goals"][1]["limit_seconds"] == 100
    assert "when" not in merged["provenance"] and [run["when"] for run in merged["provenance"]["runs"]] == [2, 3]


def test_of_a_part_that_several_runs_have_the_last_sound_figures_count() -> None:
    from benchmarks.merging import choose

    good, better = entry(pause=[1]), entry(pause=[2])
    bad, wrong = {"status": "failed", "reason": "lost"}, entry(faults=["wrong"], pause=[3])
    chosen = choose([{"a": good, "b": bad}, {"a": better, "b": wrong}, {"a": wrong, "b": bad, "c": bad}])
    assert chosen == {"a": {**better, "run": 1}, "b": {**wrong, "run": 1}, "c": {**bad, "run": 2}}


def test_runs_that_do_not_belong_together_are_not_merged() -> None:
    from benchmarks.merging import merge

    with pytest.raises(ValueError, match="revision is r and other"):
        merge([run_of(), run_of("other")])
    small = run_of()
    small["result"]["is_small"] = True
    with pytest.raises(ValueError, match="some are small"):
        merge([run_of(), small])
    with pytest.raises(ValueError, match="merged already"):
        merge([merge([run_of(), run_of()]), run_of()])


def test_every_row_has_a_part_and_every_need_a_name() -> None:
    from benchmarks import catalogue
    from benchmarks.rows import ROWS
    from benchmarks.sizes import Sizes

    makers = [*catalogue.LIMITS.values(), *catalogue.WORKLOADS.values()]
    parts = [part.name for make in makers for part in make(Sizes())]
    assert len(parts) == len(set(parts))
    assert {row.part for row in ROWS} <= set(parts)
    shown = {row.part.partition(".")[0] for row in ROWS}
    assert catalogue.WORKLOADS.keys() - shown == {"jax_preallocation"}  # it has no times
    assert set(catalogue.ON_DEMAND) <= catalogue.WORKLOADS.keys()
    assert {limit for limits in catalogue.NEEDS.values() for limit in limits} <= catalogue.LIMITS.keys()
    assert {name for names in catalogue.COMPARED_WITH.values() for name in names} <= catalogue.WORKLOADS.keys()


def test_a_figure_of_full_size_is_no_row_of_a_small_run() -> None:
    from benchmarks.rows import Row, was_run

    row = Row("pause, 32 MiB", "ebbtide", "curve.ebbtide", "pause 33554432", is_of_full_size=True)
    assert not was_run(row, {})
    assert not was_run(row, {"curve.ebbtide": {"status": "ok", "seconds": {"pause 2097152": [1.0]}}})
    assert was_run(row, {"curve.ebbtide": {"status": "ok", "seconds": {"pause 33554432": [1.0]}}})
    assert was_run(row, {"curve.ebbtide": {"status": "skipped"}}), "so that the row says why"


def test_steps_are_drawn_from_all_the_memory_to_the_least() -> None:
    from benchmarks import plots

    def part(fact: str, gigabytes: float, seconds: float, **others: Any) -> dict[str, Any]:
        facts = {fact: gigabytes * 1e9}
        return {"status": "ok", "faults": [], "facts": facts, "seconds": {"step": [seconds] * 2}, **others}

    entries = {
        "lms_programs.gpt_plain": part("peak_bytes", 30, 0.5),
        "lms_programs.gpt_checkpoint_1": part("peak_bytes", 10, 1.0),
        "lms_programs.gpt_auto_50": part("limit_bytes", 15, 2.0),
        "lms_programs.gpt_auto_85": part("limit_bytes", 25, 1.5),
        "lms_programs.gpt_auto_70": part("limit_bytes", 20, 1.75, faults=["the limit was exceeded"]),
        "lms_programs.unet_plain": part("peak_bytes", 30, 0.5),
        "lms_programs.unet_auto_50": {"status": "left out", "reason": "out of time"},
    }
    limited, checkpointed = plots.steps_of(entries, "gpt").values()
    assert limited == [(30, 500), (25, 1500), (15, 2000)]
    assert checkpointed == [(30, 500), (10, 1000)]
    assert plots.steps_of(entries, "unet")[plots.LIMITED] == []


def test_drawings_that_cannot_be_made_say_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from benchmarks import plots

    empty = {"provenance": {}, "result": {"rows": [], "measured": {}, "is_small": True}}
    assert [line.partition(":")[0] for line in plots.draw(empty, "x", tmp_path)] == [
        "no bars",
        "no sizes",
        "no training",
    ]
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(plots.NotDrawnError, match="pip install matplotlib"):
        plots.new_figure(1, 1)
