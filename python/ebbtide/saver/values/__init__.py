"""What callers may write and what they get back: tags, backups, reports, segments. Plain values, without state.

Imports nothing of the saver.
"""
