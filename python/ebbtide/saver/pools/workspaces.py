"""cuBLAS workspaces: memory that torch allocates once, keeps for itself, and that must not leave with a tag.

At the first matmul of a (handle, stream), torch takes a cuBLAS workspace of 8 to 32 MiB from its caching allocator and
keeps it in a global map. If that matmul runs inside a region, the workspace lies in the region's pool. After a pause, a
split-K matmul anywhere then writes to memory that is away, and the process is lost (CUBLAS_STATUS_EXECUTION_FAILED,
sticky). So the map is emptied before each pause, and the next matmul takes a new workspace from where it runs. The same
call empties the map of cuBLASLt workspaces in the versions of torch that have one.

A captured graph keeps the address of its workspace. Emptying the map would free that memory for others. So the map is
emptied before each capture too, and the capture takes a workspace of its own from the graph's pool.

Two cases are not covered: graphs that were captured before the process entered its first region, and the dropout state
of cuDNN's recurrent networks, which is made at their first call with dropout in training. torch offers no way to reach
the latter.
"""

from ebbtide import driver_choice
from ebbtide.torch_support import torch_names


def clear() -> None:
    """Empties torch's map of cuBLAS workspaces if torch uses the GPUs that regions cover."""
    if driver_choice.torch_on_gpu() is not None:
        torch_names.find("_C._cuda_clearCublasWorkspaces")()
