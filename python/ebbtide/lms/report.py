"""`ebbtide.lms.stats`, `report` and `plot`: what left, and what the plan for the latest step does."""

import os
from typing import Any, NamedTuple

from ebbtide import driver_choice, torch_extension
from ebbtide.errors import StateError
from ebbtide.lms import calls, control, devices, outside
from ebbtide.lms.streaming import counting
from ebbtide.sizes import format_size

_MOST_MODULES = 8  # in a report
_OTHER_LIMITS = 3  # whose forecasts are told, the last of which keeps everything


class _Step(NamedTuple):
    """Of the extension's `step_report`. Sizes are in bytes."""

    limit: int
    peak: int
    modules: list[tuple[int, int, int, int]]
    without: list[tuple[float, int]]
    with_plan: list[tuple[float, int]]
    choices: list[tuple[tuple[float, int, int, int], float, bool]]


def stats() -> dict[str, int | float]:
    """Counters since the last `enable` that turned LMS on, and what is held now, in bytes.

        print(ebbtide.lms.stats())

    device_bytes and peak_device_bytes: device memory that ebbtide holds, of the fullest device; on a GPU the peak is at
    least this where tags had memory on the host. evictions, evicted_bytes, loaded_bytes: storages that left, and bytes
    that left and came back. waited_seconds: how long the GPU or a thread had nothing to do but to wait for copies;
    hidden_seconds: copies beside other work. prefetch_hits, prefetch_late: loads that were, or were not, complete when
    their tensor was wanted. host_bytes: evicted bytes on the host now. state_evicted_bytes, state_loaded_bytes,
    state_host_bytes: the same of optimizer states, which the counters before leave out. weight_evicted_bytes,
    weight_loaded_bytes, weight_host_bytes: the same of weights. streamed_bytes: what lay on the host and passed through
    the device in optimizer steps and in forward passes without gradients. slow_reads: optimizer steps and uses of
    weights that read memory on the host, over the bus. margin_bytes: what the latest plan leaves free of the limit,
    since memory was short in spite of one. overflow_bytes, peak_overflow_bytes: on the host now and at most, since
    nothing could leave any more when they were allocated.
    """
    found: dict[str, Any] = dict.fromkeys(_COUNTERS, 0)
    found["waited_seconds"] = found["hidden_seconds"] = 0.0
    if driver_choice.is_off() or not control.was_used():
        return found
    extension: Any = torch_extension.load("_lms")
    counted = {**extension.statistics(), **extension.state_statistics(), **extension.weight_statistics()}
    found.update({name: counted[name] for name in _COUNTERS if name in counted})
    found["slow_reads"] += extension.state_statistics()["slow_reads"]
    found["state_host_bytes"] = extension.state_host_bytes()
    found["streamed_bytes"] = counting.streamed_bytes()
    found["overflow_bytes"], found["peak_overflow_bytes"] = devices.overflow_bytes()
    found["device_bytes"], found["peak_device_bytes"] = control.held_bytes()
    return found


_COUNTERS = (
    *("device_bytes", "peak_device_bytes", "evicted_bytes", "loaded_bytes", "evictions", "prefetch_hits"),
    *("prefetch_late", "waited_seconds", "hidden_seconds", "slow_reads", "host_bytes", "margin_bytes"),
    *("state_evicted_bytes", "state_loaded_bytes", "state_host_bytes"),
    *("weight_evicted_bytes", "weight_loaded_bytes", "weight_host_bytes", "streamed_bytes"),
    *("overflow_bytes", "peak_overflow_bytes"),
)


def report() -> str:
    """What left the device since LMS was turned on and what that cost, what the plan for the latest step does, what
    other limits would give, and one sentence of advice.

        print(ebbtide.lms.report())

    Call it after some steps. Its forecasts take a moment: they know computation, copies and recomputation, and no time
    in which the device waits for the program.
    """
    numbers = stats()
    limit = control.limit()
    rows = [
        ("limit", limit if isinstance(limit, str) else format_size(limit)),
        ("device memory, now and at most", _pair(numbers["device_bytes"], numbers["peak_device_bytes"])),
        ("left and came back", _pair(numbers["evicted_bytes"], numbers["loaded_bytes"])),
        ("storages that left", f"{numbers['evictions']:,}"),
        ("on the host now", format_size(int(numbers["host_bytes"]))),
        ("copies waited for, and hidden", f"{numbers['waited_seconds']:.3f} s, {numbers['hidden_seconds']:.3f} s"),
        ("loads complete when they were wanted", f"{numbers['prefetch_hits']:,}"),
        ("loads under way by then", f"{numbers['prefetch_late']:,}"),
        ("optimizer states left, came back", _pair(numbers["state_evicted_bytes"], numbers["state_loaded_bytes"])),
        ("optimizer states on the host now", format_size(int(numbers["state_host_bytes"]))),
        ("weights left, came back", _pair(numbers["weight_evicted_bytes"], numbers["weight_loaded_bytes"])),
        ("weights on the host now", format_size(int(numbers["weight_host_bytes"]))),
        ("passed through in optimizer steps", format_size(int(numbers["streamed_bytes"]))),
        ("reads of states and weights on the host", f"{numbers['slow_reads']:,}"),
        ("new memory on the host, and at most", _pair(numbers["overflow_bytes"], numbers["peak_overflow_bytes"])),
    ]
    step = _latest_step()
    if step is not None and step.peak > step.limit:
        rows += _rows_of(step)
    recomputed: dict[str, list[tuple[int, float]]] = {}
    for name, size, seconds in calls.recomputed():
        recomputed.setdefault(name, []).append((size, seconds))
    for name, parts in recomputed.items():
        size, seconds = sum(size for size, _ in parts), sum(seconds for _, seconds in parts)
        rows.append((f"recomputed in each step: {name}", f"{len(parts)}, {format_size(size)}, {seconds:.3f} s"))
    rows += [(f"not recomputed: {name}", reason) for name, reason in calls.refused().items()]
    for kind, size, reason in outside.rows():
        rows.append((f"{kind} that can't leave", f"{format_size(size)}: {reason}" if size else reason))
    width = max(len(name) for name, _ in rows)
    return "\n".join([*(f"{name:<{width}}  {value}" for name, value in rows), _advice(numbers)])


def plot(path: str | os.PathLike[str]) -> None:
    """Draws the device memory in use over the latest step, without a plan and with it, and the limit. Where ebbtide is
    off, it draws nothing.

        ebbtide.lms.plot("step.png")

    Args:
        path: of the picture. Its ending is the format: .png, .svg, .pdf.

    Raises:
        StateError: there was no step since LMS was on for the first time.
        ImportError: without Matplotlib.
    """
    if driver_choice.is_off():
        return
    step = _latest_step()
    if step is None:
        raise StateError("there is no step to draw yet: call ebbtide.lms.plot after a forward and backward with LMS on")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("ebbtide.lms.plot needs Matplotlib: pip install 'ebbtide[plot]'") from None
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for usage, name, color in ((step.without, "without LMS", "0.6"), (step.with_plan, "with the plan", "C0")):
        axes.step(
            [seconds for seconds, _ in usage],
            [size / 2**30 for _, size in usage],
            where="post",
            label=name,
            color=color,
        )
    axes.axhline(step.limit / 2**30, color="C3", linestyle="--", label="limit")
    axes.set_xlabel("seconds of computation in the step")
    axes.set_ylabel("GiB in use")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path)


def _latest_step() -> _Step | None:
    if not control.was_used():
        return None
    found: Any = torch_extension.load("_lms").step_report()
    return None if found is None else _Step(*found)


def _rows_of(step: _Step) -> list[tuple[str, str]]:
    by_class: dict[str, list[int]] = {}
    name_of = torch_extension.load("_lms").module_class
    for number, *sizes in step.modules:
        sums = by_class.setdefault(name_of(number) or "outside modules", [0, 0, 0])
        sums[:] = [total + size for total, size in zip(sums, sizes, strict=True)]
    largest = sorted(by_class.items(), key=lambda entry: -sum(entry[1]))[:_MOST_MODULES]
    rows = []
    for name, (kept, evicted, recomputed) in largest:
        parts = [("kept", kept), ("evicted", evicted), ("recomputed", recomputed)]
        told = ", ".join(f"{what} {format_size(size)}" for what, size in parts if size)
        rows.append((f"saved in a step: {name}", told))
    rows += _rows_of_choices(step)
    for part in range(_OTHER_LIMITS + 1):
        limit = step.limit + (step.peak - step.limit) * part // _OTHER_LIMITS
        rows.append((f"forecast of a step within {format_size(limit)}", _forecast(limit)))
    return rows


def _rows_of_choices(step: _Step) -> list[tuple[str, str]]:
    """Of those between which steps decided."""
    rows = []
    for (seconds, *parts), measured, is_current in step.choices if len(step.choices) > 1 else ():
        told = [f"{measured:.3f} s"] if measured else ["not measured"]
        told += [f"forecast {seconds:.3f} s", *_describe(*parts)]
        rows.append(("steps as they are now" if is_current else "steps of another choice", ", ".join(told)))
    return rows


def _forecast(limit: int) -> str:
    seconds, *parts = torch_extension.load("_lms").step_forecast(limit)
    return ", ".join([f"{seconds:.3f} s", *(_describe(*parts) or ["everything fits"])])


def _describe(moved: int, recomputed: int, states: int) -> list[str]:
    told = []
    if moved:
        told.append(f"{format_size(moved)} evicted")
    if recomputed:
        told.append(f"{recomputed} call{'' if recomputed == 1 else 's'} recomputed")
    if states:
        told.append(f"{format_size(states)} of states on the host")
    return told


_LEFT = (
    *("evictions", "loaded_bytes", "state_evicted_bytes", "state_host_bytes", "weight_evicted_bytes"),
    "weight_host_bytes",
)


def _pair(first: float, second: float) -> str:
    return f"{format_size(int(first))}, {format_size(int(second))}"


def _advice(numbers: dict[str, int | float]) -> str:
    if not control.is_enabled() and not numbers["evictions"]:
        return "Large model support is off: ebbtide.lms.enable(limit=...) turns it on."
    if numbers["peak_overflow_bytes"]:
        return "Memory was so short that new tensors lie on the host: a higher limit or a smaller batch is faster."
    if not any(numbers[name] for name in _LEFT):
        return "Nothing had to leave: the limit can be lower, or the batch larger."
    if numbers["slow_reads"] and numbers["state_host_bytes"] + numbers["weight_host_bytes"] > 0:
        return (
            "Optimizer states or weights are used on the host, over the bus: a higher limit or a smaller batch brings "
            "them back."
        )
    return "What left came back: a higher limit makes fewer bytes leave, and the step faster."
