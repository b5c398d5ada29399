"""Memory that torch caches and no tensor uses: which it is, and how it is skipped, given back or made fast again.

Imports `values`, `state` and `pools`.
"""
