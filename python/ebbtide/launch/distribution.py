"""What tells pip that torch_memory_saver is installed: metadata in site-packages, and a path to ebbtide's module.

ebbtide's module lies inside of its own package, so pip does not know of it: a program that requires torch_memory_saver
brings that one along. With these two files the requirement is satisfied, and `import torch_memory_saver` gives
ebbtide's without any variable. pip treats them as any other package: it upgrades and uninstalls them.
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
_PATH_FILE = "ebbtide-torch-memory-saver-package.pth"
_INSTALLER = "ebbtide"
_METADATA = """Metadata-Version: 2.1
Name: {name}
Version: {version}
Summary: ebbtide's module of this name, with the calls of version {calls}
Requires-Dist: ebbtide
"""


def installed() -> tuple[str, bool] | None:
    """The version of torch_memory_saver that pip sees here, and whether it is ours; None where there is none."""
    try:
        found = metadata.distribution(NAME)
    except metadata.PackageNotFoundError:
        return None
    return found.version, (found.read_text("INSTALLER") or "").strip() == _INSTALLER


def provide(version: str = VERSION) -> Path:
    """Writes the files; returns the folder of the metadata. Called again, it writes them for this version.

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
    site = _site()
    folder = site / f"{NAME}-{version}.dist-info"
    texts = {"INSTALLER": f"{_INSTALLER}\n", "METADATA": _METADATA.format(name=NAME, version=version, calls=VERSION)}
    texts["RECORD"] = "".join(f"{folder.name}/{name},,\n" for name in (*texts, "RECORD")) + f"{_PATH_FILE},,\n"
    try:
        withdraw()
        folder.mkdir()
        for name, text in texts.items():
            (folder / name).write_text(text)
        (site / _PATH_FILE).write_text(f"{preloading.compat_path()}\n")
    except OSError as error:
        raise StateError(f"{site} can't be written ({os.strerror(error.errno or 0)})") from None
    return folder


def withdraw() -> list[Path]:
    """Removes what `provide` wrote; returns what was there.

    Raises:
        OSError: it can't be removed.
    """
    site = _site()
    removed = [folder for folder in site.glob(f"{NAME}-*.dist-info") if _is_ours(folder)]
    for folder in removed:
        shutil.rmtree(folder)
    path = site / _PATH_FILE
    if path.exists():
        path.unlink()
        removed.append(path)
    return removed


def _is_ours(folder: Path) -> bool:
    try:
        return (folder / "INSTALLER").read_text().strip() == _INSTALLER
    except (OSError, ValueError):
        return False


def _site() -> Path:
    return Path(sysconfig.get_path("purelib"))
