"""Hugging Face's Trainer, unmodified, in less memory than it needs: `ebbtide run --lms` and `--overflow`.

`plain` has the whole device, and times the parts of its steps as well. The backward of its attention is not
deterministic, so the losses of two runs differ in the last digit.
"""

import math
from functools import partial
from importlib.util import find_spec

from benchmarks import device, unmodified
from benchmarks.lms_training import moved_between
from benchmarks.measured import Measured, Part, SkippedError
from benchmarks.sizes import GIB, Sizes

UNCOUNTED = 4  # steps: of large model support the first ones learn
SPREAD = 1e-6  # of a loss, relative


def train(sizes: Sizes, options: dict[str, object] | None, **arguments: object) -> unmodified.Outcome:
    device.need_gpu("a Trainer on the CPU uses no device memory")
    if find_spec("transformers") is None:
        raise SkippedError("transformers is not installed")
    return unmodified.run("trainer", options, **sizes.training.trainer, **arguments)


def measure_plain(sizes: Sizes) -> Measured:
    ran = train(sizes, None)
    parts = train(sizes, None, times_parts=True)
    seconds = {name: parts.figures["seconds"][name][UNCOUNTED:] for name in ("forward", "backward", "rest")}
    seconds["step"] = ran.figures["seconds"]["step"][UNCOUNTED:]
    return Measured(seconds=seconds, facts={name: ran.figures[name] for name in ("peak_bytes", "losses")})


def measure_limited(sizes: Sizes, way: str, limit: int) -> Measured:
    options: dict[str, object] = {"lms": f"{limit}GiB"}
    if way != "lms":
        options = {"device_limit": f"{limit}GiB", "overflow": way}
    ran, plain = train(sizes, options), train(sizes, None)
    seconds = ran.figures["seconds"]["step"]
    facts = {"limit_bytes": limit * GIB, **{name: ran.figures[name] for name in ("peak_bytes", "losses")}}
    facts |= {"first_steps": seconds[:UNCOUNTED], "said": ran.said}
    if stats := ran.figures["lms"]:
        facts |= {**stats[-1], **moved_between(*stats)}
    measured = Measured(seconds={"step": seconds[UNCOUNTED:]}, facts=facts)
    losses = zip(ran.figures["losses"], plain.figures["losses"], strict=True)
    if not all(math.isclose(*pair, rel_tol=SPREAD) for pair in losses):
        measured.faults.append("the losses are not those of training without a limit")
    if facts.get("peak_device_bytes", 0) > limit * GIB:
        measured.faults.append("more was held than the limit")
    return measured


def parts(sizes: Sizes) -> list[Part]:
    limits = sizes.training.trainer_limits
    ways = [("lms", limit) for limit in limits] + [(way, limits[0]) for way in ("split", "managed")]
    return [
        Part("lms_trainer.plain", measure_plain),
        *(Part(f"lms_trainer.{way}_{limit}", partial(measure_limited, way=way, limit=limit)) for way, limit in ways),
    ]
