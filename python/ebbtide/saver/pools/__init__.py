"""torch's allocator: the pools that regions and pauseable programs allocate from, what torch tells of them, captures.

A backend for each kind of device stands behind one protocol (`backends`). Imports `values`, `state` and `check`.
"""
