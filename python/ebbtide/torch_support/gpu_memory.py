"""What GPUs' memory is used for, and torch's limit of it."""

from ebbtide import _core


class Memory:
    """What a GPU's memory is used for, in bytes: by torch, and by the tags among that."""

    def __init__(self, device: int, is_only_one: bool) -> None:
        import torch

        self.total_bytes = int(torch.cuda.get_device_properties(device).total_memory)
        reserved = torch.cuda.memory_reserved(device)
        if is_only_one:  # sums that the core keeps
            tags = _core.tags()
            held = [(tag.size_bytes, tag.resident_bytes - tag.host_bytes) for tag in tags]
            self.unused_bytes = sum(tag.trimmed_bytes for tag in tags)
        else:
            infos = [info for info in _core.allocations() if info.device == device]
            held = [(info.size_bytes, info.resident_bytes - info.host_bytes) for info in infos]
            self.unused_bytes = sum(info.size_bytes - info.resident_bytes for info in infos if info.is_trimmed)
        of_tags, on_device = sum(size for size, _ in held), sum(resident for _, resident in held)
        self.away_bytes = of_tags - on_device  # what no tensor uses, and was released by a trim, included
        self.ordinary_bytes = max(0, reserved - of_tags)
        self.held_bytes = self.ordinary_bytes + on_device


def memories() -> dict[int, Memory]:
    devices = used_devices()
    return {device: Memory(device, len(devices) == 1) for device in devices}


def limit_of_torch(device: int) -> float:
    import torch

    return float(torch.cuda.get_per_process_memory_fraction(device))


def limit_torch(device: int, fraction: float) -> None:
    import torch

    if fraction != limit_of_torch(device):
        torch.cuda.set_per_process_memory_fraction(fraction, device)


def used_devices() -> list[int]:
    """The GPUs that torch uses in this process."""
    import torch

    torch.cuda.init()
    used = [device for device in range(torch.cuda.device_count()) if torch.cuda.memory_reserved(device)]
    return sorted({*used, torch.cuda.current_device()})
