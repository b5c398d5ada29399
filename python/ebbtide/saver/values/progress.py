"""The progress of an operation, for callbacks of `saver.configure(progress=)`."""

from dataclasses import dataclass

from ebbtide.saver.values.shown import Shown
from ebbtide.sizes import format_size


@dataclass(frozen=True)
class Progress(Shown):
    """How far an operation is.

    For example:

        saver.configure(progress=lambda now: print(now.operation, now.done_bytes, now.total_bytes))

    Attributes:
        operation: "pause", "resume", "swap", "prepare", "promote" or "demote".
        tags: the tags that were given; empty for every tag.
        done_bytes: the part of total_bytes that is known to be where the operation moves it, also if it was there
            before. Pauses, `resume(wait=False)` and `prepare(copy=True)` count as they go. Of the others only the end
            is known.
        total_bytes: the bytes of the tags.
        seconds: since the operation began.
    """

    operation: str
    tags: tuple[str, ...]
    done_bytes: int
    total_bytes: int
    seconds: float

    def __str__(self) -> str:
        whose = f" {', '.join(self.tags)}" if self.tags else ""
        moved = f"{format_size(self.done_bytes)} of {format_size(self.total_bytes)}"
        return f"{self.operation}{whose}: {moved} in {self.seconds:.1f} s"
