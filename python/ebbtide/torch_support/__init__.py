"""The parts of torch that ebbtide relies on: the versions that were tried, and the names that torch does not promise.

Imports the modules at the top of ebbtide. torch itself is imported when a name is looked up.
"""
