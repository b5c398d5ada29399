"""The C symbols `tms_*`, by torch_memory_saver's name for them."""

from ebbtide.compat.memory_saver.binary_wrapper import BinaryWrapper

__all__ = ["BinaryWrapper"]
