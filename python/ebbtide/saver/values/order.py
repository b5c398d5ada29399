"""The class of the results of `saver.order`."""

from collections.abc import Sequence
from typing import NoReturn

from ebbtide.saver.values.segments import Range


class Order:
    """The result of `saver.order`: the ranges of tensors, in an order.

        saver.resume("weights", wait=False, order=saver.order(model))

    It keeps no tensor alive.
    """

    def __init__(self, ranges: Sequence[tuple[int, Range]]) -> None:
        self.ranges = tuple(ranges)  # (device ordinal, range); of `saver.order` alone

    def __repr__(self) -> str:
        return f"<saver.Order of {len(self.ranges)} ranges>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a saver.Order holds addresses of this process: make one in the process that resumes")
