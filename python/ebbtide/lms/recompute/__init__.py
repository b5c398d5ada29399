"""Calls of modules whose saved tensors are dropped and made again in backward: which may be, and how."""
