"""Drawings of results, made from their JSON on any machine that has matplotlib: PNG and SVG beside the JSON.

- bars: what each work reaches, against the link's limit
- sizes: GB/s over size
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import provenance
from benchmarks.goals import Entries, median_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = ("png", "svg")
# Rows whose rate is one of bytes over the link, in the order of the bars.
BARS = (
    "first pause",
    "first pause after prepare",
    "resume, host memory given back",
    "steady pause",
    "steady resume",
    "swap of two tags",
    "pause, disk",
    "resume, disk",
)
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


def bars_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows to draw; work by work."""
    drawable = [row for row in rows if row.get("bytes_per_second") and row["status"] == "ok"]
    return [row for work in BARS for row in drawable if row["work"] == work]


def draw_bars(document: dict[str, Any]) -> "Figure":
    """A bar for each row with a rate, its spread as a line, and the link's rates across all of them."""
    bars = bars_of(document["result"]["rows"])
    if not bars:
        raise NotDrawnError("no work of these results has a rate: run first_pause or steady")
    figure = new_figure(10, 1.5 + 0.32 * len(bars))
    axes = figure.subplots()
    names = list(dict.fromkeys(row["who"].partition(",")[0] for row in bars))
    for place, row in enumerate(bars):
        rates = {key: row["bytes"] / row["seconds"][key] / 1e9 for key in ("median", "least", "most")}
        color = COLORS[names.index(row["who"].partition(",")[0]) % len(COLORS)]
        axes.barh(place, rates["median"], color=color)
        axes.plot([rates["most"], rates["least"]], [place, place], color="black", linewidth=1)
        axes.text(rates["least"], place, f" {rates['median']:.3g}", va="center", fontsize=8)
    axes.set_yticks(range(len(bars)), [f"{row['work']}: {row['who']}" for row in bars], fontsize=8)
    axes.invert_yaxis()
    for direction, style in (("to_host", "--"), ("to_device", ":")):
        rate = link_rate(document["result"]["measured"], direction)
        if rate is not None:
            name = f"link, {direction.replace('_', ' ')}: {rate:.3g} GB/s"
            axes.axvline(rate, color="black", linestyle=style, label=name)
    axes.set_xlabel("GB/s (median; line: least to most)")
    axes.set_title(title_of(document), fontsize=9)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, loc="lower right")
    return figure


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
        raise NotDrawnError("these results have no curve: run the work curve")
    figure = new_figure(11, 4.5)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, metric, direction in zip(panels, ("pause", "resume"), ("to_host", "to_device"), strict=True):
        for color, (name, entry) in zip(COLORS, curves.items(), strict=False):
            sizes, medians, slowest, fastest = zip(*curve_of(entry, metric), strict=True)
            axes.plot(sizes, medians, marker="o", markersize=3, color=color, label=name.removeprefix("curve."))
            axes.fill_between(sizes, slowest, fastest, color=color, alpha=0.2)
        rate = link_rate(entries, direction)
        if rate is not None:
            axes.axhline(rate, color="black", linestyle="--", label="link")
        axes.set_xscale("log", base=2)
        ticks = sorted({point[0] for entry in curves.values() for point in curve_of(entry, metric)})
        axes.set_xticks(ticks, [format_ticks(size) for size in ticks], fontsize=8, rotation=45)
        axes.set_xlabel("size")
        axes.set_title(metric)
    panels[0].set_ylabel("GB/s (median; band: least to most)")
    panels[1].legend(fontsize=8)
    figure.suptitle(title_of(document), fontsize=9)
    return figure


def format_ticks(size_bytes: int) -> str:
    mebibytes = size_bytes >> 20
    return f"{mebibytes} MiB" if mebibytes < 1024 else f"{mebibytes >> 10} GiB"


def title_of(document: dict[str, Any]) -> str:
    origin = document["provenance"]
    scale = " (small sizes: no figures to quote)" if document["result"]["is_small"] else ""
    return f"{origin['device']}, {origin['cores']} cores, torch {origin['torch']}, ebbtide {origin['revision']}{scale}"


DRAWINGS = {"bars": draw_bars, "sizes": draw_sizes}


def draw(document: dict[str, Any], beside: Path) -> Iterator[str]:
    """Draws what the results allow; gives a sentence for each file, or for each drawing that can't be made."""
    for name, make in DRAWINGS.items():
        try:
            figure = make(document)
        except NotDrawnError as reason:
            yield f"no {name}: {reason}"
            continue
        for suffix in FORMATS:
            file = beside.with_name(f"{beside.stem}-{name}.{suffix}")
            figure.savefig(file, dpi=150, metadata={"Date": None} if suffix == "svg" else None)
            yield f"drawn: {file}"
