"""The job: rounds of training, handing the weights over, and generating. The memory that a phase does not need is
paused.

| tag               | content                          | at pause                                                 |
|-------------------|----------------------------------|----------------------------------------------------------|
| `trainer_weights` | the model that learns            | kept in RAM                                              |
| `gradients`       | its gradients                    | dropped: each training step begins with zeros            |
| `optimizer`       | AdamW's two moments              | kept in RAM                                              |
| `rollout_weights` | the copy that generates          | kept in RAM                                              |
| `kv_cache`        | keys and values of the rollout   | dropped: each generation fills it anew                   |
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional

from ebbtide import driver_choice, saver
from ebbtide.demo.determinism import deterministic
from ebbtide.demo.model import LanguageModel
from ebbtide.demo.size import HEADS, PROMPT, JobSize
from ebbtide.demo.text import VOCABULARY_SIZE, decode, encode, load_text
from ebbtide.errors import StateError
from ebbtide.saver import Report
from ebbtide.saver.values.arguments import BackupName

LEARNING_RATE = 6e-3
SEED = 0  # of the weights, the batches and the generated text
TRAINER = ("trainer_weights", "gradients", "optimizer")
GENERATOR = ("rollout_weights", "kv_cache")


@dataclass(frozen=True)
class Move:
    """One pause or resume: its round and phase, its report, and the memory that ebbtide then held on the device."""

    round: int
    phase: str
    report: Report

    @property
    def held_bytes(self) -> int:
        return sum(held.bytes for held in self.report.remaining)


@dataclass
class JobResult:
    """The results of a run. `losses` are by round and step, `weights` are CPU copies, `tensors_by_tag` counts the
    tensors that were found in their tag, `bytes_by_tag` is the device memory of each tag.
    """

    losses: list[list[float]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    weights: dict[str, Any] = field(default_factory=dict)
    moves: list[Move] = field(default_factory=list)
    tensors_by_tag: dict[str, int] = field(default_factory=dict)
    bytes_by_tag: dict[str, int] = field(default_factory=dict)
    are_addresses_kept: bool = True

    @property
    def peak_bytes(self) -> int:
        """The most that ebbtide held on the device: the need of the tenants with pausing. It rises until a pause."""
        freed = {"pause": 1, "resume": 0}
        return max((move.held_bytes + freed[move.report.kind] * move.report.bytes for move in self.moves), default=0)

    def mean_loss(self, round_index: int) -> float:
        """Over the steps of the round; -1 is the last one."""
        return sum(self.losses[round_index]) / len(self.losses[round_index])

    def differences(self, other: "JobResult") -> list[str]:
        """The parts in which this run differs from `other`, to the last bit."""
        are_weights_equal = self.weights.keys() == other.weights.keys() and all(
            torch.equal(tensor, other.weights[name]) for name, tensor in self.weights.items()
        )
        is_equal = {
            "losses": self.losses == other.losses,
            "generated text": self.texts == other.texts,
            "final weights": are_weights_equal,
            "addresses": self.are_addresses_kept,
        }
        return [name for name, equal in is_equal.items() if not equal]


def run_job(size: JobSize, *, is_pausing: bool, on_step: Callable[[float], None] = lambda loss: None) -> JobResult:
    """Runs it all, and calls `on_step` with the loss of each training step. With `is_pausing` False, the same job runs
    in torch's ordinary memory: no region, no pause.

    Raises:
        StateError: a tensor lies outside its tag.
        ebbtide.Error: as regions, pause and resume.
    """
    with deterministic():
        job = _WeightSwap(size, is_pausing, on_step)
        for number in range(1, size.rounds + 1):
            job.train(number)
            job.hand_over(number)
            job.generate(number)
        return job.finish()


class _WeightSwap:
    """Two tenants of one device: `trainer` with gradients and optimizer, `rollout` with its key-value cache."""

    def __init__(self, size: JobSize, is_pausing: bool, on_step: Callable[[float], None]) -> None:
        self.size = size
        self.is_pausing = is_pausing
        self.on_step = on_step
        self.result = JobResult()
        self.device = saver.device
        self.data = torch.tensor(encode(load_text()), device=self.device)
        self.order = torch.Generator().manual_seed(SEED)
        self.randomness = torch.Generator(self.device).manual_seed(SEED)
        torch.manual_seed(SEED)
        with self._region("trainer_weights"):
            self.trainer = self._make_model()
        with self._region("gradients", backup=None):
            # Made here, once: backward adds to a gradient that is there, and on a GPU it runs in threads of its own,
            # whose new memory would lie in no region.
            for parameter in self.trainer.parameters():
                parameter.grad = torch.zeros_like(parameter)
        self.optimizer = torch.optim.AdamW(self.trainer.parameters(), lr=LEARNING_RATE)
        self._pause(1, "set up", "trainer_weights", "gradients")
        with self._region("rollout_weights"):
            self.rollout = self._make_model().requires_grad_(False)
        with self._region("kv_cache", backup=None):
            self.cache = self.rollout.make_cache(size.batch)
        self.addresses: dict[str, list[int]] = {}

    # --- the phases ---

    def train(self, number: int) -> None:
        """The generator leaves; the trainer comes back and takes its steps."""
        self._pause(number, "train", *GENERATOR)
        self._resume(number, "train", *TRAINER)
        losses: list[float] = []
        self.result.losses.append(losses)
        for step in range(self.size.steps):
            inputs, targets = self._next_batch()
            self.optimizer.zero_grad(set_to_none=False)
            loss = functional.cross_entropy(self.trainer(inputs).flatten(0, 1), targets.flatten())
            loss.backward()
            is_first = number == 1 and step == 0
            with self._region("optimizer") if is_first else nullcontext():  # the first step makes the moments
                self.optimizer.step()
            if is_first:
                self._check_tags()
            losses.append(loss.item())
            self.on_step(losses[-1])

    def hand_over(self, number: int) -> None:
        """Only the two sets of weights are on the device."""
        self._pause(number, "hand over", "gradients", "optimizer")
        self._resume(number, "hand over", "rollout_weights")
        with torch.no_grad():
            for mine, theirs in zip(self.rollout.parameters(), self.trainer.parameters(), strict=True):
                mine.copy_(theirs)

    def generate(self, number: int) -> None:
        """The trainer's weights leave too; the key-value cache comes back, empty, and is filled token by token."""
        self._pause(number, "generate", "trainer_weights")
        self._resume(number, "generate", "kv_cache")
        prompts = self.data[:PROMPT].repeat(self.size.batch, 1)
        for tokens in self.rollout.generate(prompts, self.cache, self.randomness).tolist():
            self.result.texts.append(decode(tokens))

    def finish(self) -> JobResult:
        """The trainer comes back, its weights are read, and the device is left empty."""
        self._pause(self.size.rounds, "finish", *GENERATOR)
        self._resume(self.size.rounds, "finish", *TRAINER)
        self.result.weights = {name: tensor.detach().cpu().clone() for name, tensor in self.trainer.named_parameters()}
        if self.addresses:
            self.result.are_addresses_kept = self.addresses == self._addresses()
            self.result.bytes_by_tag = {tag: saver.tags()[tag].size_bytes for tag in self.addresses}
        self._pause(self.size.rounds, "finish", *TRAINER)
        return self.result

    # --- ebbtide, or nothing ---

    def _region(self, tag: str, backup: BackupName | None = "ram") -> AbstractContextManager[Any]:
        return saver.region(tag, backup=backup) if self.is_pausing else nullcontext()

    def _pause(self, number: int, phase: str, *tags: str) -> None:
        if self.is_pausing:
            self._record(number, phase, saver.pause(*tags))

    def _resume(self, number: int, phase: str, *tags: str) -> None:
        if self.is_pausing:  # in the first round no region has named the optimizer's tag yet
            self._record(number, phase, saver.resume(*tags, missing_ok=True))

    def _record(self, number: int, phase: str, report: Report) -> None:
        if report.bytes:
            self.result.moves.append(Move(number, phase, report))

    # --- the rest ---

    def _make_model(self) -> LanguageModel:
        size = self.size
        # Initialised on the CPU, so that every device begins with the same numbers.
        return LanguageModel(VOCABULARY_SIZE, size.context, size.width, size.layers, HEADS).to(self.device)

    def _next_batch(self) -> tuple[Any, Any]:
        size = self.size
        starts = torch.randint(len(self.data) - size.context - 1, (size.batch, 1), generator=self.order)
        places = (starts + torch.arange(size.context + 1)).to(self.device)
        sequences = self.data[places]
        return sequences[:, :-1], sequences[:, 1:]

    def _tensors(self) -> Iterator[tuple[str, Any]]:
        for parameter in self.trainer.parameters():
            yield "trainer_weights", parameter
            yield "gradients", parameter.grad
            for state in self.optimizer.state[parameter].values():
                if state.device.type == self.device:  # on a GPU the step counts are CPU tensors
                    yield "optimizer", state
        for parameter in self.rollout.parameters():
            yield "rollout_weights", parameter
        yield "kv_cache", self.cache

    def _addresses(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for tag, tensor in self._tensors():
            found.setdefault(tag, []).append(tensor.data_ptr())
        return found

    def _check_tags(self) -> None:
        """Every tensor of a tenant lies in its tag: above all the gradients, which backward wrote."""
        if not self.is_pausing or driver_choice.is_off():
            return
        self.addresses = self._addresses()
        self.result.tensors_by_tag = {tag: len(addresses) for tag, addresses in self.addresses.items()}
        for expected, tensor in self._tensors():
            found = saver.where(tensor).tag
            if found != expected:
                raise StateError(f"a tensor that belongs to tag {expected!r} lies in {found or 'no tag'}")
