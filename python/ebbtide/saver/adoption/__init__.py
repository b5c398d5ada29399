"""`saver.adopt`: tensors that already exist move into a tag, unless other code may know their address.

Imports `values`, `tensors`, `pools` and `regions`.
"""
