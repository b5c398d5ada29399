"""What lies in a tag, what keeps it there, and what lies outside. Moves nothing.

Imports `values`, `state`, `tensors`, `pools` and `regions`.
"""
