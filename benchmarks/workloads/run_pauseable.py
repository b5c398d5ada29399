"""A training script under `ebbtide run --pauseable` that is paused and resumed from inside by three lines."""

from benchmarks import device, unmodified
from benchmarks.measured import Measured, Part
from benchmarks.sizes import Sizes

OPTIONS = {"pauseable": True, "tag": "default", "backup": "ram"}


def measure(sizes: Sizes) -> Measured:
    """`bytes` are those that a pause frees; on the simulated device nothing is preloaded, and nothing is freed."""
    arguments = sizes.overflow.train
    ran = unmodified.run("train", OPTIONS, **arguments, pauses=sizes.samples)
    plain = unmodified.run("train", None, **arguments, pauses=0)
    figures = ran.figures
    measured = Measured(
        bytes=figures["freed"],
        seconds={"pause": figures["pause"], "resume": figures["resume"]},
        facts={"state_bytes": figures["state_bytes"], "said": ran.said},
    )
    if figures["losses"] != plain.figures["losses"]:
        measured.faults.append("the losses are not those of the script without a pause")
    if not figures["is_exact"]:
        measured.faults.append("a parameter's bytes changed")
    if device.is_gpu() and figures["freed"] < figures["state_bytes"]:
        measured.faults.append(f"{figures['freed']} bytes were freed, of {figures['state_bytes']} at least")
    return measured


def parts(sizes: Sizes) -> list[Part]:
    return [Part("run_pauseable.ebbtide", measure)]
