"""How a step of an optimizer is divided into pieces that fit into a slot (optimizer_step.py)."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ebbtide.lms.streaming.host_ranges import HostRanges

ALIGNMENT = 256  # bytes, of a tensor in a slot
# What has less on the host is read and written there: copies of its own take longer.
LEAST_BYTES = 64 << 10


@dataclass(eq=False)
class Staged:
    """A slice of a tensor that passes through the device."""

    home: Any  # where it lies, flat
    goes_back: bool = True  # since the step may change it
    visitor: Any = None  # its copy on the device, while the slot is its

    @property
    def size_bytes(self) -> int:
        return int(self.home.numel() * self.home.element_size())


@dataclass(eq=False)
class Piece:
    """A slice of a parameter with its gradient and states, all flat."""

    home: Any  # of the parameter
    gradient: Any
    homes: dict[str, Any]  # of the states that have an element for each of the parameter's
    counters: dict[str, Any]  # the other states
    original: dict[str, Any]  # the parameter's states
    is_last: bool  # of its parameter
    is_whole: bool  # all of it
    staged: list[Staged] = field(default_factory=list)
    # What the optimizer sees, once prepared.
    parameter: Any = None
    state: dict[str, Any] = field(default_factory=dict)
    seen: dict[str, Any] = field(default_factory=dict)  # the tensors of `state` that stand for `homes`

    @property
    def staged_bytes(self) -> int:
        """What it needs of a slot."""
        return sum(round_up(each.size_bytes) for each in self.staged)

    def prepare(self) -> None:
        """Makes what the optimizer sees. Each slice begins with the counters from before the step."""
        visitors = {id(each.home): each.visitor for each in self.staged}
        self.parameter = visitors.get(id(self.home), self.home)
        self.parameter.grad = visitors.get(id(self.gradient), self.gradient)
        self.seen = {name: visitors.get(id(home), home) for name, home in self.homes.items()}
        self.state = dict(self.seen)
        for name, value in self.counters.items():
            self.state[name] = value.clone() if _is_tensor(value) and not self.is_whole else value

    def keep_state(self) -> None:
        """Takes over what the step has put in the place of what it saw, and the counters of the last slice."""
        if made := self.state.keys() - self.original.keys():
            raise RuntimeError(f"the step in pieces has made states that it did not have: {', '.join(sorted(made))}")
        for name, seen in self.seen.items():
            if (value := self.state.get(name)) is not seen and _is_tensor(value):
                seen.copy_(value)
        if not self.is_last:
            return
        for name, before in self.counters.items():
            value = self.state.get(name)
            if value is before:
                continue
            if _is_tensor(value) and _is_tensor(before):
                before.copy_(value)
            else:
                self.original[name] = value


@dataclass(eq=False)
class Chunk:
    """Pieces that share a slot, and one call of the optimizer."""

    group: dict[str, Any]
    device: Any
    pieces: list[Piece] = field(default_factory=list)
    slot: int = 0

    def stay(self) -> None:
        """Without copies: the step uses what is on the host."""
        for piece in self.pieces:
            piece.staged.clear()
            piece.prepare()


@dataclass(eq=False)
class Undivided:
    """Parameters of a group that need no copy, or allow none."""

    group: dict[str, Any]
    parameters: list[Any]


def divide(optimizer: Any, hosted: HostRanges, slot_bytes: int) -> Iterator[Chunk | Undivided]:
    """The step, in order of its groups. It is divided as it is asked for, so that copies begin before all is."""
    groups = [(group, [each for each in group["params"] if each.grad is not None]) for group in optimizer.param_groups]
    # All these optimizers leave gradients as they are, but that a fused step divides them by torch.amp's factor.
    changes_gradients = getattr(optimizer, "grad_scale", None) is not None
    is_apart = are_apart([each for _, parameters in groups for each in parameters])
    for group, parameters in groups:
        if not is_apart or not _is_uniform(parameters):
            yield Undivided(group, parameters)
            continue
        others = []
        open_chunks: dict[Any, tuple[Chunk, int]] = {}  # by device, and what they hold
        for parameter in parameters:
            state = optimizer.state.get(parameter, {})
            is_possible = has_states(optimizer, group, state)
            pieces = _divide(parameter, state, hosted, slot_bytes, changes_gradients) if is_possible else None
            if pieces is None:
                others.append(parameter)
                continue
            for piece in pieces:
                chunk, held = open_chunks.get(parameter.device, (Chunk(group, parameter.device), 0))
                if held + piece.staged_bytes > slot_bytes:
                    yield chunk
                    chunk, held = Chunk(group, parameter.device), 0
                chunk.pieces.append(piece)
                open_chunks[parameter.device] = chunk, held + piece.staged_bytes
        for chunk, _ in open_chunks.values():
            yield chunk
        if others:
            yield Undivided(group, others)


def has_states(optimizer: Any, group: dict[str, Any], state: dict[str, Any]) -> bool:
    """Whether a step makes no state any more for a parameter of the group that has this."""
    if type(optimizer).__name__ != "SGD":
        return bool(state)  # a step makes every state at once
    return not group["momentum"] or _is_tensor(state.get("momentum_buffer"))


def are_apart(parameters: list[Any]) -> bool:
    """Whether no two of them share memory, as one that is there twice does."""
    ranges = sorted((each.data_ptr(), each.nbytes) for each in parameters if each.numel() > 0)
    return all(begin + size <= after for (begin, size), (after, _) in itertools.pairwise(ranges))


def _is_uniform(parameters: list[Any]) -> bool:
    """Whether torch chooses the same implementation for a part of the group as for all of it."""
    import torch

    kinds = (torch.Tensor, torch.nn.Parameter)
    return (
        all(type(each) in kinds and each.grad.layout is torch.strided for each in parameters)
        and len({each.device.type for each in parameters}) <= 1
    )


def _divide(
    parameter: Any, state: Any, hosted: HostRanges, slot_bytes: int, changes_gradients: bool
) -> list[Piece] | None:
    """None: it can't be divided, or lies on the device, but for little."""
    gradient = parameter.grad
    like = {name: value for name, value in state.items() if _is_tensor(value) and value.shape == parameter.shape}
    counters = {name: value for name, value in state.items() if name not in like}
    tensors = [parameter, gradient, *like.values()]
    if not all(_is_counter(value) for value in counters.values()) or gradient.dtype != parameter.dtype:
        return None
    if parameter.dim() == 0 or not all(_is_plain(each, parameter) for each in tensors) or not is_dense(parameter):
        return None
    away = [each for each in tensors if hosted.holds_any(each.data_ptr(), each.nbytes)]
    if sum(each.nbytes for each in away) < LEAST_BYTES:
        return None
    element_bytes = sum(each.element_size() for each in away)
    # Slices of a multiple of 64 elements are aligned as the whole is.
    most = max(64, (slot_bytes - ALIGNMENT * len(away)) // element_bytes // 64 * 64)
    flat = [each.detach().as_strided((each.numel(),), (1,)) for each in tensors]
    total = parameter.numel()
    pieces = []
    for begin in range(0, total, most):
        end = min(total, begin + most)
        home, of_gradient, *of_states = slices = [each[begin:end] for each in flat]
        homes = dict(zip(like, of_states, strict=True))
        piece = Piece(home, of_gradient, homes, counters, state, end == total, end - begin == total)
        for part in slices:
            if hosted.holds_any(part.data_ptr(), part.nbytes):
                piece.staged.append(Staged(part, part is not of_gradient or changes_gradients))
        pieces.append(piece)
    return pieces


def _is_counter(value: Any) -> bool:
    return value.numel() == 1 if _is_tensor(value) else isinstance(value, (int, float))


def _is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def _is_plain(tensor: Any, parameter: Any) -> bool:
    """Whether its elements lie one after the other, in the order of the parameter's."""
    import torch

    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.shape == parameter.shape
        and tensor.stride() == parameter.stride()
        and tensor.device == parameter.device
        and not tensor.is_complex()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def is_dense(tensor: Any) -> bool:
    """Whether its elements fill a stretch of memory, each once."""
    expected = 1
    for stride, size in sorted(
        (stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1
    ):
        if stride != expected:
            return False
        expected *= size
    return True


def round_up(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT
