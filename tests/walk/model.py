"""The state that the walk expects: plain values, and no logic of ebbtide except its promises."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from ebbtide import _core

from . import device

POISON = 0xEB
ORDINARY = None  # in place of a tag: memory outside all regions


class Failure(AssertionError):  # noqa: N818
    """The real state differs from the model."""


class Skip(Exception):  # noqa: N818
    """An object of the step does not exist: an earlier step was removed by the shrinker, or refused."""


@dataclass(frozen=True)
class Policy:
    """A region's arguments."""

    tag: str
    backup: str | None = "ram"
    retain: bool = False
    overflow: str | None = None
    threads: str = "own"


@dataclass(eq=False)
class Stored:
    """The stored bytes of one pause, as its views show them."""

    bytes: np.ndarray


@dataclass(eq=False)
class View:
    """A tensor that `backup_of` returned: `length` bytes from `offset` of the stored bytes."""

    tensor: torch.Tensor
    memory: int
    stored: Stored
    offset: int
    length: int


@dataclass(eq=False)
class Memory:
    """A storage: its tensors, and its expected bytes.

    is_paused: nothing may access it. is_doubtful: an operation failed midway, so parts of it may be away. may_be_zero:
    some granules may have been dropped, others not. may_be_lent: another library knew its address once. is_lent:
    another library knows it now.
    """

    base: torch.Tensor
    expected: np.ndarray
    policy: Policy | None
    address: int
    aliases: dict[int, tuple[torch.Tensor, int]] = field(default_factory=dict)  # tensor, offset
    partners: dict[int, Any] = field(default_factory=dict)  # tensors that came through DLPack, and arrays
    holder: Any = None  # a module or an optimizer that contains it
    is_paused: bool = False
    is_doubtful: bool = False
    may_be_zero: bool = False
    may_be_lent: bool = False
    is_foreign: bool = False
    stored: Stored | None = None
    is_dropped: bool = False  # it is away, and nothing has its bytes
    kept: np.ndarray | None = None  # its bytes as they came back last, where that is known

    @property
    def tag(self) -> str | None:
        return None if self.policy is None else self.policy.tag

    @property
    def is_lent(self) -> bool:
        return bool(self.partners) or self.is_foreign

    @property
    def size_bytes(self) -> int:
        return len(self.expected)

    @property
    def has_spilled(self) -> bool:
        """Whether a part of it is (or may be) on the host."""
        info = _core.find(self.address) if self.policy is not None else None
        return info is not None and info.host_bytes > 0

    def detach(self) -> None:
        """Called when the memory is resident again: views of its backup keep those bytes."""
        if self.stored is not None:
            self.stored.bytes = self.expected.copy()
            self.stored = None

    def settle_zeros(self) -> None:
        """Determines which granules were dropped: a granule is all zeros or all poison, or nothing of it was
        dropped."""
        found = device.read(self.base)
        begin = 0
        while begin < self.size_bytes:
            end = min(begin + device.GRANULE - (self.address + begin) % device.GRANULE, self.size_bytes)
            if not np.array_equal(found[begin:end], self.expected[begin:end]):
                blank = found[begin]
                if blank not in (0, POISON) or (found[begin:end] != blank).any():
                    raise Failure(f"bytes {begin} to {end} are neither what they were nor zeros nor poison")
                self.expected[begin:end] = blank
            begin = end
        self.may_be_zero = False

    def is_away(self) -> bool:
        return _core.is_away(self.address, self.size_bytes)


@dataclass(eq=False)
class Scope:
    """One open region or `disabled()` of an actor. `policy` None means `disabled()`. `generator` is set if a generator
    holds it."""

    number: int
    policy: Policy | None
    manager: Any
    generator: Any = None

    @property
    def takes_all_threads(self) -> bool:
        return self.policy is not None and self.policy.threads == "all"


class Routes:
    """The region of an allocation, by the rules of `frames.visible_frames` and `csrc/torch/cpu/routing.h`."""

    def __init__(self, actors: int) -> None:
        self.scopes: list[list[Scope]] = [[] for _ in range(actors)]
        self._shown: list[list[Scope]] = [[] for _ in range(actors)]
        self._for_all: list[Scope] = []

    def open(self, actor: int, scope: Scope) -> None:
        self.scopes[actor].append(scope)
        self._show(actor)

    def close(self, actor: int, scope: Scope) -> None:
        self.scopes[actor].remove(scope)
        self._show(actor)

    def visit(self, actor: int, policy: Policy, *, is_disabled: bool) -> None:
        """Records that a region was entered and left, perhaps with `disabled()` inside. A region for all threads that
        was suspended meanwhile is the newest one afterwards."""
        scopes = [Scope(0, policy, None)]
        if is_disabled:
            scopes.append(Scope(0, None, None))
        for scope in scopes:
            self.open(actor, scope)
        for scope in reversed(scopes):
            self.close(actor, scope)

    def is_for_all_threads(self) -> bool:
        """Whether any region for all threads is open."""
        return any(scope.takes_all_threads for scopes in self.scopes for scope in scopes)

    def _show(self, actor: int) -> None:
        wanted, shown = self._visible(self.scopes[actor]), self._shown[actor]
        common = 0
        while common < min(len(wanted), len(shown)) and wanted[common] is shown[common]:
            common += 1
        for scope in shown[common:]:
            if scope.takes_all_threads:
                self._for_all.remove(scope)
        self._for_all += [scope for scope in wanted[common:] if scope.takes_all_threads]
        self._shown[actor] = wanted

    @staticmethod
    def _visible(scopes: list[Scope]) -> list[Scope]:
        if not scopes:
            return []
        top = scopes[-1]
        if not top.takes_all_threads and top.policy is not None:
            for scope in reversed(scopes[:-1]):
                if scope.policy is None:
                    break
                if scope.takes_all_threads:
                    return [scope, top]
        return [top]

    def policy(self, actor: int) -> Policy | None:
        """The policy of the actor's next allocation."""
        shown = self._shown[actor]
        if shown and not shown[-1].takes_all_threads:
            return shown[-1].policy
        return self._for_all[-1].policy if self._for_all else ORDINARY

    def find(self, number: int) -> tuple[int, Scope]:
        for actor, scopes in enumerate(self.scopes):
            for scope in scopes:
                if scope.number == number:
                    return actor, scope
        raise Skip

    def leased_tags(self) -> set[str]:
        return {scope.policy.tag for scopes in self.scopes for scope in scopes if scope.policy is not None}


class Model:
    """Everything that the walk holds."""

    def __init__(self, actors: int) -> None:
        self.memories: dict[int, Memory] = {}
        self.views: dict[int, View] = {}
        self.routes = Routes(actors)
        self.named: set[str] = set()
        self.limits: dict[str, Any] = {}
        self.foreign_bytes = 0
        self.pendings: dict[int, Any] = {}
        self.hooks: dict[int, Any] = {}
        self.generators: dict[int, Any] = {}
        self._last_number = 0

    def new_number(self) -> int:
        """A number for an object that a step makes. It is an argument of the step, so that the step means the same in a
        shorter walk."""
        self._last_number += 1
        return self._last_number

    def memory(self, number: int) -> Memory:
        if number not in self.memories:
            raise Skip
        return self.memories[number]

    def of_tags(self, tags: list[str]) -> list[Memory]:
        """The memories of these tags, or of every tag if there are none."""
        return [memory for memory in self.memories.values() if memory.policy and (not tags or memory.tag in tags)]

    def known_tags(self) -> list[str]:
        return sorted(self.named)

    # --- effects of operations on memory ------------------------------------------------------------------------------

    def pause(self, memory: Memory, keeps: bool) -> None:
        """A pause of its tag succeeded. `keeps`: with a backup."""
        if memory.is_paused and not memory.is_doubtful:
            return
        memory.may_be_zero |= memory.is_dropped  # and some of it may have come back before
        if not keeps:
            if memory.is_doubtful:  # memory that was away then is kept
                memory.may_be_zero = True
            else:
                memory.is_dropped = True
                memory.expected[:] = 0
                memory.may_be_zero = False
        memory.is_paused, memory.is_doubtful = True, False

    def resume(self, memory: Memory) -> None:
        """A resume of its tag succeeded."""
        if memory.is_dropped and memory.is_doubtful:  # some of it may have come back before, when poison was otherwise
            memory.may_be_zero = True
        elif memory.is_dropped:
            memory.expected[:] = POISON if _core.get_setting("poison") == b"1" else 0
        if memory.is_paused:
            is_known = not (memory.is_dropped or memory.is_doubtful or memory.may_be_zero)
            memory.kept = memory.expected.copy() if is_known else None
        memory.is_paused = memory.is_doubtful = memory.is_dropped = False
        memory.detach()

    def doubt(self, memory: Memory, may_drop: bool) -> None:
        """An operation that would have moved it failed midway, or was interrupted: asks the core for its state."""
        was_paused = memory.is_paused
        info = _core.find(memory.address)
        has_been_left = info is not None and info.is_paused  # left in host memory by a pause: it looks resident
        memory.is_paused = memory.is_away() or has_been_left
        memory.is_doubtful = True
        memory.may_be_zero |= may_drop
        memory.kept = None
        if was_paused and not memory.is_paused:
            memory.may_be_zero |= memory.is_dropped
            memory.is_dropped = False
            memory.detach()
