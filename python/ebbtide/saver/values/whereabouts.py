"""The result of `saver.where`."""

from dataclasses import dataclass

from ebbtide.saver.values.shown import Shown
from ebbtide.sizes import format_size


@dataclass(frozen=True)
class Whereabouts(Shown):
    """Where the bytes that a tensor spans are.

        print(saver.where(model.weight).device_bytes)

    Attributes:
        tag: the tag that they belong to; None for memory that is not ebbtide's.
        device: the ordinal of the device that they belong to; None for CPU memory that is not ebbtide's.
        device_bytes: bytes in the device's own memory.
        host_bytes: bytes in host memory, where the device reads them over the bus (spilled or demoted).
        stored_bytes: bytes in a backup, since the tag is paused.
        dropped_bytes: bytes that a pause without a backup dropped. They come back as zeros.
        outside_bytes: bytes of memory that is not ebbtide's.
    """

    tag: str | None
    device: int | None
    device_bytes: int = 0
    host_bytes: int = 0
    stored_bytes: int = 0
    dropped_bytes: int = 0
    outside_bytes: int = 0

    def __str__(self) -> str:
        places = {
            f"on device {self.device}": self.device_bytes,
            "on the host": self.host_bytes,
            "stored": self.stored_bytes,
            "dropped": self.dropped_bytes,
            "outside of ebbtide": self.outside_bytes,
        }
        parts = ", ".join(f"{format_size(size)} {place}" for place, size in places.items() if size) or "0 B"
        return parts if self.tag is None else f"{parts} (tag {self.tag})"
