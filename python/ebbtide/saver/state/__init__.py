"""What this process has registered or has under way: known tags, hooks, running resumes, a pauseable program.

Asks the core and remembers, but moves nothing. Imports `values`.
"""
