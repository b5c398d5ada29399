"""The public functions that move memory or tell of it, from `saver.pause` to `saver.configure`: a module for each.

The top room: imports `values`, `state`, `tensors`, `check`, `pools`, `reclaim` and `copying`.
"""
