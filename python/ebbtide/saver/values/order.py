"""What `saver.order` returns."""

from collections.abc import Sequence

from ebbtide.saver.values.segments import Range


class Order:
    """Where the bytes of tensors lie, in an order: what `saver.order` returns.

        saver.resume("weights", wait=False, order=saver.order(model))

    It keeps no tensor alive.
    """

    def __init__(self, ranges: Sequence[tuple[int, Range]]) -> None:
        self.ranges = tuple(ranges)  # (device ordinal, range)

    def __repr__(self) -> str:
        return f"<saver.Order of {len(self.ranges)} tensors>"
