"""A call that is run as usual and then a second time beside its kept tensors, to see whether both save the same bits.

A mismatch in a trial costs nothing. In backward it would be fatal, or unseen.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from ebbtide.lms.recompute import bits
from ebbtide.lms.recompute.global_states import OtherRandomStates, RandomStates, Switches
from ebbtide.lms.recompute.second_runs import DRAWS, Call
from ebbtide.lms.recompute.structures import Structure, tensors_in
from ebbtide.lms.recompute.surroundings import Surroundings
from ebbtide.lms.recompute.watch import Findings, Stopped


def try_out(call: Call, module: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, str]:
    """Runs the call as usual, then again, and compares all that autograd saves, bit for bit.

    Only for a call without an `objection`, where `may_decide` holds. The second run ends at the first difference, and
    before operations that can't be undone. Afterwards the generators of torch and the attributes of the module are what
    one run leaves.

    Returns:
        What the first run returned, and why the call can't be recomputed, as a sentence fragment; "" if it can.
    """
    structure = Structure(arguments, options, module)
    before, random_before = Surroundings(module, structure), RandomStates(structure.tensors)
    others = OtherRandomStates()
    kept = [_keep(tensor) for tensor in structure.tensors]
    saved: list[Any] = []
    with _recording(saved):
        output = call(module, *arguments, **options)
    if structure.unknown:
        return output, structure.unknown
    if objection := DRAWS if others.have_moved() else before.change(arguments, options):
        return output, objection
    if not saved:
        return output, "it saves nothing for backward"
    random_after = RandomStates(structure.tensors)
    random_before.restore()
    findings, switches = Findings(), Switches.now()
    try:
        filled, named = structure.fill([_kept(keeper) for keeper in kept])
        with switches.restored(), _comparing(saved, findings), before.watched(findings):
            result = call(module, *filled, **named)
        findings.objection = findings.objection or _compare_results(output, result)
    except Stopped:
        pass
    except Exception as error:
        findings.objection = f"its second run raised {type(error).__name__}: {error}"
    finally:
        random_after.restore()
        before.restore()
    return output, findings.objection or before.change(arguments, options)


# --- what autograd saves ---


@functools.cache
def _keeper_class() -> Any:
    """torch may be missing when this module is imported."""
    import torch

    class Keeper(torch.autograd.Function):
        """Saves one tensor, as a checkpoint does: the hooks outside see it, and a later change in place raises."""

        @staticmethod
        def forward(ctx: Any, begin: Any, tensor: Any) -> Any:
            ctx.save_for_backward(tensor)
            return begin.detach()

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            raise AssertionError("nothing depends on it")

    return Keeper


def _keep(tensor: Any) -> Any:
    """A tensor whose graph keeps this one. It must live: torch 2.11 empties the node of a dead one."""
    import torch

    with torch.enable_grad():
        return _keeper_class().apply(torch.empty(0, requires_grad=True, device="cpu"), tensor)


def _kept(keeper: Any) -> Any:
    return keeper.grad_fn.saved_tensors[0]


@contextlib.contextmanager
def _recording(saved: list[Any]) -> Iterator[None]:
    """Adds what keeps each saved tensor. It is the graph's as well, so that the program's hooks outside, and torch's
    check of versions, hold for what these hooks would hide from them.
    """
    import torch

    def pack(tensor: Any) -> Any:
        hooks.__exit__()
        try:
            # A node that keeps its own output keeps itself, for ever if no backward comes.
            saved.append(_keep(tensor if tensor.is_leaf else tensor.detach()))
        finally:
            hooks.__enter__()
        return saved[-1]

    hooks: Any = torch.autograd.graph.saved_tensors_hooks(pack, _kept)
    try:
        with hooks:
            yield
    finally:
        hooks = None  # or it and `pack` would keep each other, and all that was saved, until the next collection


@contextlib.contextmanager
def _comparing(saved: list[Any], findings: Findings) -> Iterator[None]:
    """Compares as the second run saves, and lets go of what it saved."""
    import torch

    count = 0

    def pack(tensor: Any) -> None:
        nonlocal count
        if count == len(saved):
            findings.stop("its second run saves more tensors")
        before = _kept(saved[count]).detach()
        if (different := bits.difference(before, tensor.detach())) and not (
            different == "bits" and _may_be_unset(tensor)
        ):
            findings.stop(f"its second run saves another tensor: {different} of number {count}")
        count += 1

    def unpack(nothing: None) -> None:
        findings.stop("it runs a backward in its forward")

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
    if count < len(saved):
        findings.stop("its second run saves fewer tensors")


def _may_be_unset(tensor: Any) -> bool:
    """Kernels of attention save the state of the random numbers, an integer or two, and leave it unset where they draw
    none. Where it matters, the results differ as well.
    """
    import torch

    return tensor.dtype in (torch.int64, torch.uint64) and tensor.numel() <= 2


def _compare_results(first: Any, second: Any) -> str:
    one, other = tensors_in(first), tensors_in(second)
    if len(one) != len(other):
        return "its second run returns other tensors"
    different = next(filter(None, map(bits.difference, one, other)), "")
    return f"its second run returns another tensor: {different}" if different else ""
