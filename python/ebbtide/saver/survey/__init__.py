"""What lies in a tag, and what keeps it there. Moves nothing.

Imports `values`, `state`, `tensors` and `pools`.
"""
