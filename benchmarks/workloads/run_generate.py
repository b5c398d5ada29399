"""Tokens from a transformer whose weights exceed the device's limit, by each way there is to go on.

ebbtide's three policies under `ebbtide run`, offloading by module as accelerate does it, and the same weights on a
device where they fit. No memory is pinned for `offload`, as accelerate does by default; `offload_pinned` is what its
user could make of it.
"""

from functools import partial

from benchmarks import unmodified
from benchmarks.measured import Measured, Part
from benchmarks.rows import OFFLOADS, POLICIES, generating
from benchmarks.sizes import Sizes

# What offloading leaves of the limit for its copies and for the activations.
WORKING_SHARE = 0.06


def measure(sizes: Sizes, who: str, over: float) -> Measured:
    """`token` is seconds for one token; `over_bytes` is the part of the weights beyond the limit."""
    size = sizes.overflow
    arguments = {
        **size.generate,
        "weight_bytes": int((1 + over) * size.limit_bytes),
        "resident_bytes": int((1 - WORKING_SHARE) * size.limit_bytes),
        "placement": who if who in OFFLOADS else "plain",
    }
    is_ours = who in POLICIES
    options = {"overflow": who, "device_limit": size.limit_bytes, "summary": True} if is_ours else None
    ran = unmodified.run("generate", options, **arguments)
    figures = ran.figures
    measured = Measured(seconds={"token": figures["token"]}, facts={"said": ran.said} if is_ours else {})
    measured.facts |= {name: figures[name] for name in ("weight_bytes", "offloaded_bytes", "digest")}
    measured.facts["over_bytes"] = figures["weight_bytes"] - size.limit_bytes
    if not figures["is_steady"]:
        measured.faults.append("the same prompt gave different tokens")
    return measured


def parts(sizes: Sizes) -> list[Part]:
    whos = (*POLICIES, *OFFLOADS, "fits")
    return [
        Part(generating(who, over), partial(measure, who=who, over=over))
        for over in sizes.overflow.weights_over
        for who in whos
    ]
