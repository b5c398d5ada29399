"""Device memory, for tests of programs."""

from ebbtide import _core, driver_choice, saver

from torch_memory_saver.utils import is_xpu

__all__ = ["empty_cache", "get_and_print_gpu_memory", "get_device", "is_xpu"]


def get_device() -> str:
    """torch's name for the device of regions: "cuda", or "cpu" on the simulated device."""
    return saver.device


def empty_cache() -> None:
    """Frees torch's cached memory outside regions."""
    import torch

    if saver.device == "cuda":
        torch.cuda.empty_cache()


def get_and_print_gpu_memory(message: str, gpu_id: int = 0) -> int:
    """Prints and returns how many bytes of a device are in use, by all processes; of the simulated one, by this. Where
    ebbtide is off and torch has no GPU, 0."""
    import torch

    if saver.device == "cuda":
        free, total = torch.cuda.mem_get_info(gpu_id)
    elif driver_choice.is_off():
        free, total = 0, 0
    else:
        info = _core.query_device(gpu_id)
        free, total = info.free_bytes, info.total_bytes
    print(f"GPU {gpu_id} memory: {(total - free) / 1024**3:.2f} GB ({message})")
    return total - free
