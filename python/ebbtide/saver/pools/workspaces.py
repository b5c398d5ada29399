"""What torch keeps for itself in memory that it allocated once, and that must not leave with a tag.

torch takes a cuBLAS workspace (8 to 32 MiB) from its caching allocator at the first matmul of a (handle, stream) and
keeps it in a global map. Where that first matmul is inside a region, the workspace lies in the region's pool; after a
pause, a split-K matmul anywhere writes to memory that is away and the process is lost
(CUBLAS_STATUS_EXECUTION_FAILED, sticky). So the map is emptied before each pause: the next matmul takes a new one
from where it runs. The map of cuBLASLt workspaces is emptied by the same call, in the versions of torch that have
one.

A graph that was captured keeps the address of its workspace. Emptying the map would hand that memory to others, so it
is emptied before each capture as well: the capture then takes a workspace of its own from the graph's pool.

Not reached by this: graphs that were captured before the process entered its first region; and, since torch offers no
way: the dropout state of cuDNN's recurrent networks, which is made at their first call with dropout in training.
"""

from ebbtide import driver_choice
from ebbtide.torch_support import torch_names


def clear() -> None:
    """Empties torch's map of cuBLAS workspaces, if torch uses the GPUs that regions cover."""
    if driver_choice.torch_on_gpu() is not None:
        torch_names.find("_C._cuda_clearCublasWorkspaces")()
