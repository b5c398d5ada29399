"""Drawings of results, made from their JSON on any machine that has matplotlib, as SVG.

- bars: seconds beside the baselines, as in the README
- sizes: GB/s over size
- training: a step over the memory it may have, as in the README
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import provenance
from benchmarks.goals import Entries, median_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The bars of the front page's chart: its words, the benchmark's row, and whose rows are one bar.
GROUPS = {
    "first pause": "first pause",
    "resume": "resume, host memory given back",
    "repeated pause": "steady pause",
    "repeated pause,\nnothing changed": "pause, nothing changed",
    "repeated resume": "steady resume",
}
COMPARED = {
    "ebbtide": ("ebbtide", "ebbtide, retain"),
    "torch_memory_saver": ("torch_memory_saver",),
    "vLLM's algorithm": ("vllm_sleep",),
    "tensor.cpu() and .cuda()": ("plain_copy",),
}
# The names of the curves.
KEEPERS = {
    "ebbtide_retain": "ebbtide, retained host memory",
    "ebbtide_ram": "ebbtide, fresh host memory",
    "torch_memory_saver": "torch_memory_saver",
    "vllm_sleep": "vLLM's algorithm",
    "plain_copy": "tensor.cpu() and .cuda()",
}
# Those of lms_programs that are drawn, and their names.
PROGRAMS = {"gpt": "GPT, 537 M parameters", "unet": "UNet", "hf_gpt2": "GPT-2 of transformers"}
LIMITED = "large model support; at the right, without"
# They copy everything each time, so an unchanged tag takes them as long as a changed one.
UNCHANGED, CHANGED = "pause, nothing changed", "steady pause"
INK = "#808080"  # reads on light and dark backgrounds
COLORS = ("#0072b2", "#56b4e9", "#d55e00", "#e69f00", "#999999", "#009e73", "#cc79a7")


class NotDrawnError(Exception):
    """Why nothing can be drawn."""


def new_figure(width: float, height: float) -> "Figure":
    """Without a window, and with texts in SVG that stay texts.

    Raises:
        NotDrawnError: matplotlib is missing.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise NotDrawnError(f"plots need matplotlib: pip install matplotlib ({error})") from error
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "ebbtide"})
    matplotlib.rcParams.update({"axes.grid": True, "axes.axisbelow": True})
    return Figure(figsize=(width, height), layout="constrained")


def link_rate(entries: Entries, direction: str) -> float | None:
    """GB/s of one pinned copy; None where it was not measured."""
    seconds = median_of(entries, "limits.link", direction)
    return None if seconds is None else entries["limits.link"]["bytes"] / seconds / 1e9


def compared_seconds(rows: list[dict[str, Any]], workload: str, who: tuple[str, ...]) -> float | None:
    """The median of a workload; None where it was not measured."""
    sound = [row for row in rows if row["status"] == "ok" and row["who"] in who and row.get("seconds")]
    found = [row["seconds"]["median"] for row in sound if row["workload"] == workload]
    if not found and workload == UNCHANGED:
        return compared_seconds(rows, CHANGED, who)
    return found[0] if found else None


def draw_bars(document: dict[str, Any]) -> "Figure":
    """Seconds beside the baselines, on a logarithmic axis."""
    rows = document["result"]["rows"]
    seconds = {
        (group, name): found
        for group, workload in GROUPS.items()
        for name, who in COMPARED.items()
        if (found := compared_seconds(rows, workload, who)) is not None
    }
    if not any(name == "ebbtide" for _, name in seconds):
        raise NotDrawnError("no workload of these results compares with a baseline: run first_pause or steady")
    figure = new_figure(8.5, 5.5)
    axes = figure.subplots()
    for number, (name, color) in enumerate(zip(COMPARED, COLORS, strict=False)):
        bars = [(place, seconds[group, name]) for place, group in enumerate(GROUPS) if (group, name) in seconds]
        at = [place + (number - (len(COMPARED) - 1) / 2) * 0.2 for place, _ in bars]
        axes.barh(at, [value for _, value in bars], height=0.18, color=color, label=name)
        for y, (_, value) in zip(at, bars, strict=True):
            axes.text(value * 1.06, y, f"{value:#.2g}".rstrip(".") + " s", va="center", fontsize=8, color=INK)
    axes.set_xscale("log")
    axes.set_xlim(min(seconds.values()) / 2, max(seconds.values()) * 2.5)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_yticks(range(len(GROUPS)), list(GROUPS))
    axes.invert_yaxis()
    axes.set_xlabel(f"seconds, logarithmic ({title_of(document)})", fontsize=8)
    axes.grid(visible=False)
    legend = axes.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, frameon=False)
    paint(axes, [*legend.get_texts()])
    return figure


def paint(axes: Any, texts: list[Any]) -> None:
    """Inks that are legible on light and dark pages, over a transparent background."""
    axes.figure.patch.set_alpha(0)
    axes.patch.set_alpha(0)
    axes.tick_params(colors=INK, which="both")
    for spine in axes.spines.values():
        spine.set_visible(False)
    for text in (axes.xaxis.label, *axes.get_yticklabels(), *texts):
        text.set_color(INK)


def curve_of(entry: dict[str, Any], metric: str) -> list[tuple[int, float, float, float]]:
    """(bytes, median, slowest, fastest GB/s) of each size."""
    points = []
    for name, seconds in entry.get("seconds", {}).items():
        kind, _, size = name.partition(" ")
        if kind == metric:
            summary = provenance.summarize(seconds)
            median, slowest, fastest = (int(size) / summary[key] / 1e9 for key in ("median", "most", "least"))
            points.append((int(size), median, slowest, fastest))
    return sorted(points)


def draw_sizes(document: dict[str, Any]) -> "Figure":
    """Two panels, pause and resume: a line for each keeper, its spread as a band, the link's rate as a limit."""
    entries = document["result"]["measured"]
    sound = {name: entry for name, entry in entries.items() if entry["status"] == "ok" and not entry["faults"]}
    curves = {name: entry for name, entry in sound.items() if name.startswith("curve.")}
    if not curves:
        raise NotDrawnError("these results have no curve: run the workload curve")
    figure = new_figure(11, 4.5)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, metric, direction in zip(panels, ("pause", "resume"), ("to_host", "to_device"), strict=True):
        for color, (name, entry) in zip(COLORS, curves.items(), strict=False):
            sizes, medians, slowest, fastest = zip(*curve_of(entry, metric), strict=True)
            axes.plot(sizes, medians, marker="o", markersize=3, color=color, label=keeper_of(name))
            axes.fill_between(sizes, slowest, fastest, color=color, alpha=0.2)
        rate = link_rate(entries, direction)
        if rate is not None:
            axes.axhline(rate, color=INK, linestyle="--", label="link")
        axes.set_xscale("log", base=2)
        ticks = sorted({point[0] for entry in curves.values() for point in curve_of(entry, metric)})
        axes.set_xticks(ticks, [format_ticks(size) for size in ticks], fontsize=8, rotation=45)
        axes.set_xlabel("size of the tag")
        axes.set_title(metric)
        axes.grid(visible=True, color=INK, alpha=0.3)
        paint(axes, [axes.title, axes.yaxis.label, *axes.get_xticklabels()])
    panels[0].set_ylabel("GB/s (median; band: least to most)")
    finish(figure, panels[1], 3, document)
    return figure


def finish(figure: "Figure", panel: Any, columns: int, document: dict[str, Any]) -> None:
    """One legend for all panels, that of this one, and the title."""
    handles, names = panel.get_legend_handles_labels()
    legend = figure.legend(handles, names, fontsize=8, loc="outside lower center", ncols=columns, frameon=False)
    title = figure.suptitle(title_of(document), fontsize=9)
    for text in (title, *legend.get_texts()):
        text.set_color(INK)


def draw_training(document: dict[str, Any]) -> "Figure":
    """A panel for each program: milliseconds of a step with large model support, and with checkpoints."""
    entries = document["result"]["measured"]
    found = {name: steps for name in PROGRAMS if (steps := steps_of(entries, name))[LIMITED]}
    if not found:
        raise NotDrawnError("these results have no training in less memory: run the workload lms_programs")
    figure = new_figure(11, 3.6)
    panels = figure.subplots(1, len(found), squeeze=False)[0]
    for axes, (name, steps) in zip(panels, found.items(), strict=True):
        for color, style, (way, points) in zip(COLORS[::2], "-:", steps.items(), strict=False):
            axes.plot(*zip(*points, strict=True), marker="o", markersize=4, linestyle=style, color=color, label=way)
        axes.set_ylim(bottom=0)
        axes.set_title(PROGRAMS[name], fontsize=10)
        axes.set_xlabel("GB: the limit, or what torch reserved", fontsize=8)
        axes.grid(visible=True, color=INK, alpha=0.3)
        paint(axes, [axes.title, axes.yaxis.label])
    panels[0].set_ylabel("ms of a step")
    finish(figure, panels[0], 2, document)
    return figure


def steps_of(entries: Entries, name: str) -> dict[str, list[tuple[float, float]]]:
    """(GB, milliseconds) of each way, from all the memory to the least."""

    def points(kind: str, fact: str) -> list[tuple[float, float]]:
        prefix = f"lms_programs.{name}_{kind}"
        found = {part: median_of(entries, part, "step") for part in entries if part.startswith(prefix)}
        sound = [(entries[part]["facts"][fact] / 1e9, seconds * 1e3) for part, seconds in found.items() if seconds]
        return sorted(sound, reverse=True)

    whole, limited = points("plain", "peak_bytes"), points("auto_", "limit_bytes")
    return {
        LIMITED: whole + limited if limited else [],
        "every block checkpointed, every 2nd, 3rd and 4th": whole + points("checkpoint_", "peak_bytes"),
    }


def keeper_of(entry: str) -> str:
    """The words for "curve.NAME"."""
    name = entry.removeprefix("curve.")
    return KEEPERS.get(name, name)


def format_ticks(size_bytes: int) -> str:
    mebibytes = size_bytes >> 20
    return f"{mebibytes} MiB" if mebibytes < 1024 else f"{mebibytes >> 10} GiB"


def title_of(document: dict[str, Any]) -> str:
    origin = document["provenance"]
    scale = " (small sizes: no figures to quote)" if document["result"]["is_small"] else ""
    return f"{origin['device']}, {origin['cores']} cores, torch {origin['torch']}, ebbtide {origin['revision']}{scale}"


DRAWINGS = {"bars": draw_bars, "sizes": draw_sizes, "training": draw_training}


def draw(document: dict[str, Any], name: str, folder: Path) -> Iterator[str]:
    """Draws the charts that the results allow as `folder`/`name`-KIND.svg; gives a sentence for each file, or for each
    drawing that can't be made."""
    for kind, make in DRAWINGS.items():
        try:
            figure = make(document)
        except NotDrawnError as reason:
            yield f"no {kind}: {reason}"
            continue
        file = folder / f"{name}-{kind}.svg"
        figure.savefig(file, metadata={"Date": None})
        yield f"drawn: {file}"
