"""The provenance of a figure: the machine, the versions and the arguments. And its statistics."""

import json
import os
import platform
import re
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
KERNEL_DRIVER = Path("/proc/driver/nvidia/version")


def git_revision() -> str:
    """The commit, with "-dirty" where the tree has changes; "unknown" without git."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def kernel_driver_version() -> str | None:
    """NVIDIA's, such as "580.95.05"; None where there is none."""
    text = KERNEL_DRIVER.read_text() if KERNEL_DRIVER.exists() else ""
    match = re.search(r"\b\d+\.\d+(?:\.\d+)?\b", text)
    return match[0] if match else None


def collect(arguments: dict[str, Any], revision: str) -> dict[str, Any]:
    """GPU, driver, versions, revision, arguments, time. No host names and no paths."""
    import ebbtide
    import torch
    from ebbtide import _core

    info = _core.query_device(0)
    return {
        "driver": _core.driver_name(),
        "device": info.name,
        "device_bytes": info.total_bytes,
        "cuda_driver": _core.driver_version(),
        "kernel_driver": kernel_driver_version(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "ebbtide": ebbtide.__version__,
        "revision": revision,
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "arguments": arguments,
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def summarize(values: list[float]) -> dict[str, float | int]:
    """Median, the middle half, the extremes, count."""
    quarters = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return {
        "median": statistics.median(values),
        "quarter": quarters[0],
        "three_quarters": quarters[2],
        "least": min(values),
        "most": max(values),
        "count": len(values),
    }


def write(out: Path, name: str, document: dict[str, Any]) -> Path:
    """The file: `out` itself where it is named as one, else `name`.json in it. Whole or not at all."""
    file = out if out.suffix == ".json" else out / f"{name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f".{file.name}.part")
    part.write_text(json.dumps(document, indent=1) + "\n")
    part.rename(file)
    return file
