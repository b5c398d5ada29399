"""Copies ahead of a pause, while the memory is in use: at once, beside the program, or after each resume.

Imports `values`, `state` and `reclaim`.
"""
