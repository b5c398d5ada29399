"""A line that each Python of this installation runs at its start, so that EBBTIDE_COMPAT=tms alone is enough.

`ebbtide run --compat tms` and `ebbtide.env(compat="tms")` put ebbtide's folder on PYTHONPATH. A launcher that gives its
workers another PYTHONPATH, as Ray's runtime environments do, leaves the other variables. The line reads EBBTIDE_COMPAT,
and without "tms" there it does nothing. It imports nothing but `os` and `sys`, which Python has loaded by then.
"""

import os
import sysconfig
from pathlib import Path

from ebbtide.errors import StateError
from ebbtide.launch import preloading

NAME = "ebbtide-torch-memory-saver.pth"
_LINE = (
    'import os, sys; os.environ.get("EBBTIDE_COMPAT", "").strip().lower() == "tms" and {0!a} not in sys.path '
    "and os.path.isdir({0!a}) and sys.path.insert(0, {0!a})\n"
)


def location() -> Path:
    """Its path, whether or not it is there."""
    return Path(sysconfig.get_path("purelib")) / NAME


def content() -> str:
    """The line. It names the folder of this ebbtide; where that is gone, it does nothing."""
    return _LINE.format(preloading.compat_path().as_posix())


def install() -> Path:
    """Writes it. Called again, it writes the same.

    Raises:
        StateError: the folder can't be written.
    """
    path = location()
    new = path.with_name(f"{NAME}.{os.getpid()}")
    try:
        new.write_text(content())
        new.replace(path)  # at once, for a Python that starts meanwhile
    except OSError as error:
        raise StateError(
            f"{path.parent} can't be written ({os.strerror(error.errno or 0)}): put {preloading.compat_path()} first "
            "in the PYTHONPATH that the launcher gives to its workers"
        ) from None
    return path


def uninstall() -> Path | None:
    """Removes it; None where there is none.

    Raises:
        StateError: it can't be removed.
    """
    path = location()
    try:
        path.unlink()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StateError(f"{path} can't be removed ({os.strerror(error.errno or 0)}): remove it yourself") from None
    return path


def state() -> str:
    """ "none", "ours", or "another" where the file names the folder of another ebbtide."""
    try:
        return "ours" if location().read_text() == content() else "another"
    except OSError:
        return "none"
    except ValueError:  # its text is none of ours
        return "another"
