"""The device margin under torch's CUDA allocator, poison behind kernels, and retained backups of a GPU's memory."""

from collections.abc import Callable

import pytest


@pytest.mark.device_memory
def test_a_margin_makes_torch_give_its_cache_back(program: Callable[..., str]) -> None:
    program(
        """
with saver.region("w"):
    cached = torch.empty(512 * MIB, dtype=torch.uint8, device="cuda")
outside = torch.empty(1024 * MIB, dtype=torch.uint8, device="cuda")
del outside  # in the cache of torch's default pool
saver.configure(device_margin=free() - 256 * MIB)
try:
    with saver.region("other"):
        torch.empty(512 * MIB, dtype=torch.uint8, device="cuda")
    raise AssertionError("the margin was not kept")
except torch.OutOfMemoryError:
    pass
saver.pause("w")
saver.resume("w")  # what comes back may use it
torch.cuda.empty_cache()
with saver.region("other"):
    fits = torch.empty(512 * MIB, dtype=torch.uint8, device="cuda")
assert cached.numel() and fits.numel()
"""
    )


@pytest.mark.device_memory
def test_poison_behind_a_resume_in_the_background(program: Callable[..., str]) -> None:
    program(
        """
saver.configure(poison=True)
with saver.region("kv", backup=None):
    kv = torch.ones(1500 * MIB, dtype=torch.uint8, device="cuda")
with saver.region("w"):
    w = torch.randint(0, 255, (700 * MIB,), dtype=torch.uint8, device="cuda")
check = w[:: 1 << 16].cpu()
for wait in (True, False):
    kv.fill_(1)
    saver.pause("kv", "w")
    done = saver.resume("kv", "w", wait=wait)
    # Queued behind the bytes, on this stream.
    assert bool((kv == 0xEB).all()) and torch.equal(w[:: 1 << 16].cpu(), check)
    if not wait:
        done.wait()
"""
    )


@pytest.mark.device_memory
@pytest.mark.parametrize("backup", ["ram", "pinned", "disk"])
def test_a_retained_backup_at_one_address(program: Callable[..., str], backup: str) -> None:
    program(
        f"""
with saver.region("w", backup="{backup}", retain=True):
    w = torch.randint(0, 255, (300 * MIB,), dtype=torch.uint8, device="cuda")
saver.pause("w")
shown = saver.backup_of(w, retained=True)
saver.resume("w")
assert saver.backup_of(w, retained=True).data_ptr() == shown.data_ptr()
assert torch.equal(shown, w.cpu())
w.add_(1)
assert not torch.equal(shown, w.cpu())
saver.pause("w")
after = shown.clone()
saver.resume("w")
assert torch.equal(after, w.cpu())
"""
    )
