"""The log lines of operations. Each is built only if the logger takes it."""

import logging
from collections.abc import Iterable, Sequence

from ebbtide import logs
from ebbtide.saver.values.reports import VERBS, Adoption, Report, Swap
from ebbtide.sizes import format_size

_MOST_TAGS = 8


def log_report(report: Report, asked: Sequence[str]) -> Report:
    """Logs the result of an operation: one line at INFO, and each tag and device at DEBUG. Returns the report.

    The line names the tags of which something moved, and else those that were asked for (none: every tag). Call it when
    the operation is over and no lock is held, because handlers are code of the program.
    """
    if logs.is_enabled():
        logs.log(logging.INFO, "%s", _describe(report, asked))
        _log_rows(report)
    return report


def log_swap(swap: Swap, leaving: Sequence[str], returning: Sequence[str]) -> Swap:
    """Like `log_report`, with one line for both sides."""
    if logs.is_enabled():
        sides = f"{_describe(swap.paused, leaving)}; {_describe(swap.resumed, returning)}"
        logs.log(logging.INFO, "%s", f"swap in {swap.seconds:.3f} s: {sides}")
        _log_rows(swap.paused)
        _log_rows(swap.resumed)
    return swap


def log_adoption(adoption: Adoption) -> Adoption:
    """Logs at INFO the memory that moved into a tag, and at DEBUG the rest. Returns the adoption."""
    if logs.is_enabled():
        first, *others = str(adoption).splitlines()
        logs.log(logging.INFO, "%s", first + _rate(adoption.bytes, adoption.seconds))
        for line in others:
            logs.log(logging.DEBUG, "%s", f"adopt into {adoption.tag}: {line.strip()}")
    return adoption


def _describe(report: Report, asked: Sequence[str]) -> str:
    tags = _join(report.by_tag or asked) or "every tag"
    did = f"{VERBS.get(report.kind, 'claimed')} {format_size(report.bytes)}"
    text = f"{report.kind} {tags}: {did} in {report.seconds:.3f} s"
    if report.copied:
        text += f", {format_size(report.copied)} copied{_rate(report.copied, report.seconds)}"
    return f"{text}; {report.note}" if report.note else text


def _log_rows(report: Report) -> None:
    if not logs.is_enabled(logging.DEBUG):
        return
    for row in report.rows:
        sizes = {"": row.bytes, " copied": row.copied, " clean": row.clean, " unused": row.unused}
        sizes[" constant"] = row.constant
        line = ", ".join(f"{format_size(size)}{name}" for name, size in sizes.items() if size or not name)
        logs.log(logging.DEBUG, "%s", f"{report.kind} {row.tag} on device {row.device}: {line}")


def _join(tags: Iterable[str]) -> str:
    names = list(tags)
    others = len(names) - _MOST_TAGS
    return ", ".join(names[:_MOST_TAGS]) + (f" and {others} more" if others > 0 else "")


def _rate(size_bytes: int, seconds: float) -> str:
    return f" ({size_bytes / seconds / 1e9:.3g} GB/s)" if size_bytes and seconds > 0 else ""
