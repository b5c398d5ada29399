"""The registrations of this process: known tags, hooks, a pauseable program.

Asks the core and remembers, but moves nothing. Imports `values`.
"""
