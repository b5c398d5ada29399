"""Where the build's tools and headers are."""

import os
import sys
from pathlib import Path


def find_cuda_include() -> Path:
    """The folder of cuda.h, looked for where CMake looks (cmake/EbbtideCudaHeaders.cmake)."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    candidates = [Path(home) / "include" for home in homes if home]
    for entry in filter(None, sys.path):
        candidates += [Path(entry) / "nvidia/cu13/include", Path(entry) / "nvidia/cuda_runtime/include"]
    for folder in candidates:
        if (folder / "cuda.h").is_file():
            return folder
    raise FileNotFoundError("cuda.h is missing: pip install nvidia-cuda-runtime, or set CUDA_HOME")
