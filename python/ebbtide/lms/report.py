"""`ebbtide.lms.report`: what left, in a table and one sentence."""

from ebbtide.lms import calls, control, outside
from ebbtide.sizes import format_size


def report() -> str:
    """What left the device since LMS was turned on, what that cost, and one sentence of advice.

        print(ebbtide.lms.report())

    Print it after some steps: print(ebbtide.lms.report()).
    """
    numbers = control.stats()
    limit = control.limit()
    rows = [
        ("limit", "the device" if limit is None else format_size(limit)),
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
    ]
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


_LEFT = (
    *("evictions", "loaded_bytes", "state_evicted_bytes", "state_host_bytes", "weight_evicted_bytes"),
    "weight_host_bytes",
)


def _pair(first: float, second: float) -> str:
    return f"{format_size(int(first))}, {format_size(int(second))}"


def _advice(numbers: dict[str, int | float]) -> str:
    if not control.is_enabled() and not numbers["evictions"]:
        return "Large model support is off: ebbtide.lms.enable(limit=...) turns it on."
    if not any(numbers[name] for name in _LEFT):
        return "Nothing had to leave: the limit can be lower, or the batch larger."
    if numbers["slow_reads"] and numbers["state_host_bytes"] + numbers["weight_host_bytes"] > 0:
        return (
            "Optimizer states or weights are used on the host, over the bus: a higher limit or a smaller batch brings "
            "them back."
        )
    return "What left came back: a higher limit makes fewer bytes leave, and the step faster."
