"""A table that is larger than the device: its first part is on the device, the rest in host memory.

Ops see one tensor at one address. Once the device has room, the rest moves there.
"""

import torch
from ebbtide import saver

saver.configure(device_limit="32MiB")  # makes any device a small one

with saver.region("table", overflow="split"):
    table = torch.arange(20 << 20, dtype=torch.float32, device=saver.device)  # 80 MiB
rows = table.view(-1, 1024)
address = table.data_ptr()
print(saver.tags())
on_host = saver.tags()["table"].host_bytes
assert 48 << 20 <= on_host < 80 << 20

rows += rows.mean(dim=1, keepdim=True)  # reads and writes both parts
expected = table.cpu().clone()

print(saver.pause("table"))  # the part on the host takes no device memory, and stays there
print(saver.resume("table"))
assert torch.equal(table.cpu(), expected)

saver.configure(device_limit=None)  # the device has room again
print(saver.promote("table"))
assert saver.tags()["table"].host_bytes == 0
assert table.data_ptr() == address and torch.equal(table.cpu(), expected)
print(f"{on_host >> 20} MiB spilled and came home: the same bytes at the same address")
