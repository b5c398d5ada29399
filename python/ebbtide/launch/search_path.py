"""Search paths in variables: PYTHONPATH, LD_LIBRARY_PATH."""

import os


def with_first(folder: str, inherited: str) -> str:
    """The path with this folder first and once, then the user's own entries. An empty entry is the working directory,
    but an empty value is no entry."""
    return os.pathsep.join([folder, *own_entries(folder, inherited)])


def own_entries(folder: str, inherited: str) -> list[str]:
    """The entries of a path besides this folder."""
    return [entry for entry in inherited.split(os.pathsep) if entry != folder] if inherited else []
