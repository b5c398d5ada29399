"""Arguments of callers, and results: tags, backups, reports, segments. Plain values, without state.

Imports nothing of the saver.
"""
