"""`saver.adopt`: tensors that already exist move into a tag, unless somebody else may know their address.

Imports `values`, `tensors`, `pools` and `regions`.
"""
