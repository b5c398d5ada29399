"""The memory of tensors: which tensors an object holds, which bytes they span, who else learns of their addresses.

Knows nothing of pools and regions. Imports `values`.
"""
