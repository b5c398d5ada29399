"""What this process has registered: known tags, hooks, a pauseable program.

Asks the core and remembers, but moves nothing. Imports `values`.
"""
