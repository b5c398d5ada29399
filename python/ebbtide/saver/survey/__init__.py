"""The memory in a tag, its holders, and the memory outside. Moves nothing.

Imports `values`, `state`, `tensors`, `pools` and `regions`.
"""
