"""Files in site-packages that give programs ebbtide's torch_memory_saver.

- The start-up file is a line that each Python of this installation runs at its start. It makes EBBTIDE_COMPAT=tms
  enough where a launcher gives its workers another PYTHONPATH, as Ray's runtime environments do. It imports only `os`
  and `sys`, which are loaded by then. Without the variable, or where this ebbtide is gone, it does nothing.
- The metadata of torch_memory_saver satisfies programs that require it, and a path lets Python find ebbtide's module.
  pip upgrades and uninstalls them as it does any other package.
"""

import os
import re
import shutil
import sysconfig
from importlib import metadata
from pathlib import Path

from ebbtide.errors import StateError
from ebbtide.launch import preloading

NAME = "torch_memory_saver"
VERSION = "0.0.10"  # whose calls the module has
STARTUP_FILE = "ebbtide-torch-memory-saver.pth"
_PATH_FILE = "ebbtide-torch-memory-saver-package.pth"
_LINE = (
    'import os, sys; os.environ.get("EBBTIDE_COMPAT", "").strip().lower() == "tms" and {0!a} not in sys.path '
    "and os.path.isdir({0!a}) and sys.path.insert(0, {0!a})\n"
)
_INSTALLER = "ebbtide"
_METADATA = """Metadata-Version: 2.1
Name: {name}
Version: {version}
Summary: ebbtide's module of this name, with the calls of version {calls}
Requires-Dist: ebbtide
"""


def site() -> Path:
    """The folder."""
    return Path(sysconfig.get_path("purelib"))


def startup_line() -> str:
    """The content of the start-up file of this ebbtide."""
    return _LINE.format(preloading.compat_path().as_posix())


def write_startup_file() -> Path:
    """Writes it, or the same again.

    Raises:
        StateError: the folder can't be written.
    """
    path = site() / STARTUP_FILE
    new = path.with_name(f"{STARTUP_FILE}.{os.getpid()}")
    try:
        new.write_text(startup_line())
        new.replace(path)  # at once, for a Python that starts meanwhile
    except OSError as error:
        raise StateError(
            f"{path.parent} can't be written ({os.strerror(error.errno or 0)}): put {preloading.compat_path()} first "
            "in the PYTHONPATH that the launcher gives to its workers"
        ) from None
    return path


def installed() -> tuple[str, bool] | None:
    """The version of torch_memory_saver that pip sees here, and whether it is ours; None where there is none."""
    try:
        found = metadata.distribution(NAME)
    except metadata.PackageNotFoundError:
        return None
    return found.version, (found.read_text("INSTALLER") or "").strip() == _INSTALLER


def provide(version: str = VERSION) -> Path:
    """Writes metadata and path; returns the folder of the metadata. Called again, it writes them for this version.

    Raises:
        ValueError: not a version.
        StateError: another torch_memory_saver is installed, or the folder can't be written.
    """
    if re.fullmatch(r"\d+(\.\w+)*", version) is None:
        raise ValueError(f"a version is such as {VERSION}, not {version!r}")
    known = installed()
    if known is not None and not known[1]:
        raise StateError(
            f"torch_memory_saver {known[0]} is installed: `pip uninstall torch_memory_saver` first, or leave it, and "
            "set EBBTIDE_COMPAT=tms where ebbtide's is wanted"
        )
    folder = site() / f"{NAME}-{version}.dist-info"
    texts = {"INSTALLER": f"{_INSTALLER}\n", "METADATA": _METADATA.format(name=NAME, version=version, calls=VERSION)}
    texts["RECORD"] = "".join(f"{folder.name}/{name},,\n" for name in (*texts, "RECORD")) + f"{_PATH_FILE},,\n"
    try:
        _remove(_package_files())
        folder.mkdir()
        for name, text in texts.items():
            (folder / name).write_text(text)
        (site() / _PATH_FILE).write_text(f"{preloading.compat_path()}\n")
    except OSError as error:
        raise StateError(f"{site()} can't be written ({os.strerror(error.errno or 0)})") from None
    return folder


def remove_all() -> list[Path]:
    """Removes the files that ebbtide wrote; returns their paths.

    Raises:
        StateError: one of them can't be removed.
    """
    try:
        return _remove([*_package_files(), site() / STARTUP_FILE])
    except OSError as error:
        raise StateError(
            f"{error.filename} can't be removed ({os.strerror(error.errno or 0)}): remove it yourself"
        ) from None


def _package_files() -> list[Path]:
    return [*filter(_is_ours, site().glob(f"{NAME}-*.dist-info")), site() / _PATH_FILE]


def _is_ours(folder: Path) -> bool:
    try:
        return (folder / "INSTALLER").read_text().strip() == _INSTALLER
    except (OSError, ValueError):
        return False


def _remove(paths: list[Path]) -> list[Path]:
    removed = []
    for path in paths:
        try:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
            removed.append(path)
        except FileNotFoundError:
            pass
    return removed
