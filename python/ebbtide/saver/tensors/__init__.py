"""The memory of tensors: which tensors an object holds, which bytes they span, which other objects learn of their
addresses.

Knows nothing of pools and regions. Imports `values`.
"""
