"""`ebbtide --cflags --libs`: the flags that compile and link a C or C++ program against the installed library."""

import shlex
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]


def describe(*, cflags: bool, libs: bool, cmake_dir: bool, pkgconfig_dir: bool) -> str:
    """The flags in one line, and a line for each folder."""
    flags = [f"-I{_PACKAGE / 'include'}"] * cflags
    flags += [f"-L{_PACKAGE}", "-lebbtide", f"-Wl,-rpath,{_PACKAGE}"] * libs
    folders = {"cmake": cmake_dir, "pkgconfig": pkgconfig_dir}
    asked = [str(_PACKAGE / folder) for folder, is_asked in folders.items() if is_asked]
    return "\n".join([shlex.join(flags)] * bool(flags) + asked)
