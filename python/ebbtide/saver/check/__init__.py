"""EBBTIDE_CHECK=1: each op and each read of a tensor whose memory is away is an error instead of a crash, and
an optimizer that lies outside of a paused tag is a warning.

Imports `values` and `tensors`.
"""
