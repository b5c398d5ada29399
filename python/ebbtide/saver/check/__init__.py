"""EBBTIDE_CHECK=1: each op and each read of a tensor whose memory is away is an error instead of a crash.

Imports nothing else of the saver.
"""
