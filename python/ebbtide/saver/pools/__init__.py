"""torch's allocator: the pools that regions and pauseable programs allocate from, their state by torch, captures.

A backend for each kind of device stands behind one protocol (`backends`). Imports `values`, `state` and `check`.
"""
