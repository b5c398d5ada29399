"""A program that uses ebbtide, for mypy alone (`make lint`): an error that is not marked, and a mark without an error,
are failures.
"""

import ebbtide
from ebbtide import lms, saver

with saver.region("weights", backup="pinned", retain=True) as region:
    print(region.tag, saver.device.upper(), len(saver.timeline), ebbtide.__version__)
report = saver.pause("weights", ["kv_cache", "graphs"], missing_ok=True)
print(report.bytes + saver.pause({"weights": "ram", "kv_cache": None}).copied)
pending = saver.resume("weights", wait=False)
print(pending.wait().bytes, saver.resume().seconds, saver.swap(pause={"a", "b"}, resume=("c",)).paused.bytes)
with saver.paused({"weights": "disk"}) as moved:
    print(moved.bytes)
with lms.enable(limit="1GiB"):
    lms.limit = "2GiB"
for row in saver.outside(report):
    print(row.name, len(saver.outside(report)))

saver.pause({"weights": "dsk"})  # type: ignore[dict-item]
saver.pause("weights", backup="dsk")  # type: ignore[call-overload]
saver.puase("weights")  # type: ignore[attr-defined]
print(saver.timelime)  # type: ignore[attr-defined]
ebbtide.enabel(3)  # type: ignore[attr-defined]
print(ebbtide.OutOfMemoryErorr)  # type: ignore[attr-defined]
print(ebbtide.lms.limt)  # type: ignore[attr-defined]
print(saver.paused("weights").__enter__().nothing)  # type: ignore[attr-defined]
saver.pause(3)  # type: ignore[call-overload]
saver.region("weights", threads="al")  # type: ignore[arg-type]
