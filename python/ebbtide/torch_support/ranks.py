"""Whether the process is one of several that compute together."""


def has_ranks() -> bool:
    """Whether torch has a process group with others now."""
    import torch

    processes = torch.distributed
    return processes.is_available() and processes.is_initialized() and processes.get_world_size() > 1
