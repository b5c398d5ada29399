#!/usr/bin/env python3
"""Where the processors spend the time of a pause: a flame graph of all threads, from samples of Linux's perf.

    perf record -k CLOCK_MONOTONIC -e cpu-clock -F 997 -g -o perf.data -- python3 tools/flame_graph.py pauses >times
    perf script -i perf.data -F comm,tid,time,ip,sym --ns >samples
    python3 tools/flame_graph.py draw times samples --title "..." --out FILE

Build with CXXFLAGS=-fno-omit-frame-pointer and without stripping, or the stacks are short and nameless. It prints the
functions with the largest shares of their own as well.
"""

import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

Stack = tuple[str, ...]
HEADER = re.compile(r"^(?P<thread>.+?)\s+\d+\s+(?P<seconds>\d+\.\d+):\s*$")
LEAST_SHARE = 0.015  # narrower boxes are left out
NAMED_SHARE = 0.03  # narrower boxes have no room for a name


@click.group()
def main() -> None:
    """Flame graphs of pauses."""


@main.command()
@click.option("--count", default=10, help="How many pauses after the first.")
@click.option("--first", is_flag=True, help="Only the first pause of the process.")
@click.option("--background", is_flag=True, help="Not the pauses: the calls of resume(wait=False).")
@click.option("--scale", default=1.0, help="Of 15 GiB.")
def pauses(count: int, first: bool, background: bool, scale: float) -> None:
    """Pauses and resumes 15 GiB and prints when each pause began and ended, in seconds of CLOCK_MONOTONIC."""
    from ebbtide import saver

    from benchmarks import tensors as kept
    from benchmarks.keepers import Ebbtide

    keeper = Ebbtide(backup="ram", retain=not first)
    keeper.make(kept.llama_shapes(scale))
    kept.fill(keeper.tensors)
    for number in range(1 if first else 1 + count):
        kept.change(keeper.tensors)
        times = [time.clock_gettime(time.CLOCK_MONOTONIC)]
        keeper.pause()
        times.append(time.clock_gettime(time.CLOCK_MONOTONIC))
        if background:
            time.sleep(0.3)
            times = [time.clock_gettime(time.CLOCK_MONOTONIC)]
            pending = saver.resume(keeper.tag, wait=False)
            times.append(time.clock_gettime(time.CLOCK_MONOTONIC))
            pending.wait()
        else:
            keeper.resume()
        if first or number:
            print(*(f"{each:.9f}" for each in times))


@main.command()
@click.argument("times", type=click.Path(exists=True, path_type=Path))
@click.argument("samples", type=click.Path(exists=True, path_type=Path))
@click.option("--title", required=True, help="What was measured, and where.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="An SVG.")
def draw(times: Path, samples: Path, title: str, out: Path) -> None:
    """Draws the samples that were taken during the pauses."""
    spans = [tuple(map(float, line.split())) for line in times.read_text().splitlines()]
    counts = Counter(
        stack for seconds, stack in read_samples(samples) if any(begin <= seconds <= end for begin, end in spans)
    )
    if not counts:
        raise click.ClickException("no sample lies within a pause: did perf record with -k CLOCK_MONOTONIC?")
    figure = draw_stacks(counts, title)
    figure.savefig(out, metadata={"Date": None})
    total = counts.total()
    own = Counter[str]()
    for stack, count in counts.items():
        own[stack[-1]] += count
    click.echo(f"{total} samples in {len(spans)} pauses of {sum(end - begin for begin, end in spans):.2f} s together")
    for name, count in own.most_common(12):
        click.echo(f"{count / total:6.1%} {name}")


def read_samples(file: Path) -> Iterator[tuple[float, Stack]]:
    """The time and the stack of each sample, the thread first and the innermost function last."""
    for block in file.read_text().split("\n\n"):
        lines = block.strip("\n").splitlines()
        header = HEADER.match(lines[0]) if lines else None
        if header:
            frames = [shorten(line.split(maxsplit=1)[1]) for line in lines[1:] if len(line.split(maxsplit=1)) == 2]
            named = [name for name in reversed(frames[1:]) if name != "[unknown]"]
            yield float(header["seconds"]), (header["thread"].strip(), *named, *frames[:1])


def shorten(name: str) -> str:
    """A function's name without arguments and namespaces."""
    plain = re.sub(r"\(.*|<.*|\[clone.*", "", name.replace("(anonymous namespace)::", "")).strip()
    return plain.rsplit("::", 2)[-1] if plain.count("::") < 2 else "::".join(plain.split("::")[-2:])


def draw_stacks(counts: Counter[Stack], title: str) -> Any:
    """A row for each depth; a box is as wide as its share of the processors' time."""
    from benchmarks.plots import COLORS, INK, new_figure

    total = counts.total()
    boxes: list[tuple[int, float, float, str]] = []  # depth, left, width, name

    def place(stacks: Counter[Stack], depth: int, left: float) -> None:
        below: dict[str, Counter[Stack]] = {}
        for stack, count in stacks.items():
            if stack:
                below.setdefault(stack[0], Counter())[stack[1:]] += count
        for name, inner in sorted(below.items()):
            width = inner.total() / total
            if width >= LEAST_SHARE:
                boxes.append((depth, left, width, name))
                place(inner, depth + 1, left)
            left += width

    place(counts, 0, 0.0)
    figure = new_figure(11, 1.2 + 0.22 * (1 + max(depth for depth, *_ in boxes)))
    axes = figure.subplots()
    for depth, left, width, name in boxes:
        color = COLORS[sum(map(ord, name)) % len(COLORS)]
        axes.barh(depth, width, left=left, height=0.9, color=color, alpha=0.55, edgecolor="white", linewidth=0.4)
        if width >= NAMED_SHARE:
            room = int(width * 150)
            text = name if len(name) <= room else name[: max(room - 1, 0)] + "…"
            axes.text(left + 0.002, depth, text, va="center", fontsize=6, color="black", clip_on=True)
    axes.set_xlim(0, 1)
    axes.margins(y=0.01)
    axes.set_yticks([])
    axes.xaxis.set_major_formatter("{x:.0%}")
    axes.set_xlabel(f"of the processors' time ({title})", fontsize=8, color=INK)
    axes.grid(visible=False)
    axes.tick_params(colors=INK)
    figure.patch.set_alpha(0)
    axes.patch.set_alpha(0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return figure


if __name__ == "__main__":
    main()
