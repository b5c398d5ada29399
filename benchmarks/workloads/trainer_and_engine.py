"""A model that one process trains and another generates with, hundreds of turns long, on a device that has no room for
what both need: as examples/08_trainer_and_engine.py. The weights are there once; an update copies nothing.
"""

import os
from typing import Any

import torch
from ebbtide import saver
from ebbtide.demo.model import LanguageModel
from ebbtide.demo.text import VOCABULARY_SIZE, encode, load_text
from torch.nn.functional import cross_entropy

from benchmarks import device, peer
from benchmarks.measured import Measured, Part, Stopwatch
from benchmarks.peer import Peer
from benchmarks.sizes import Sizes, TurnsSize
from benchmarks.tensors import Checker
from benchmarks.workloads.hand_over import PATIENCE_SECONDS, fill_up

CHECKED_EACH = 10  # turns


def make_model(size: TurnsSize) -> LanguageModel:
    torch.manual_seed(0)
    with torch.device(saver.device):
        return LanguageModel(VOCABULARY_SIZE, size.tokens, size.width, size.layers, size.heads)


# --- the engine -------------------------------------------------------------------------------------------------------


class Engine:
    def __init__(self, size: TurnsSize, shares: dict[str, saver.Shared]) -> None:
        self._trainer = os.getppid()
        weights = {name: saver.attach(share) for name, share in shares.items()}
        with torch.device("meta"):
            self._model = LanguageModel(VOCABULARY_SIZE, size.tokens, size.width, size.layers, size.heads)
        self._model.requires_grad_(False).load_state_dict(weights, assign=True)
        with saver.region("kv_cache", backup=None, exportable=True):
            self._cache = self._model.make_cache(size.batch)
            self._blocks = torch.empty(size.blocks_bytes, dtype=torch.uint8, device=saver.device)
        self._prompt = torch.tensor(encode(load_text())[:4], device=saver.device).repeat(size.batch, 1)

    def generate(self, turn: int) -> float:
        """The sum of all weights, after a generation for which all of the engine's memory was written."""
        saver.resume("kv_cache", timeout=PATIENCE_SECONDS)
        self._blocks.fill_(turn % 256)
        self._model.generate(self._prompt, self._cache, torch.Generator(saver.device).manual_seed(turn))
        if int(self._blocks[-1].item()) != turn % 256:
            raise AssertionError("the engine's own memory has other bytes than it wrote")
        return sum_of(self._model)


_engines: list[Engine] = []


def make_engine(size: TurnsSize, shares: dict[str, saver.Shared]) -> None:
    _engines.append(Engine(size, shares))
    _engines[0].generate(0)
    saver.pause("kv_cache")


def generate(turn: int) -> float:
    return _engines[0].generate(turn)


def hand_back() -> None:
    saver.hand_over(pause="kv_cache", to=os.getppid(), timeout=PATIENCE_SECONDS)


# --- the trainer ------------------------------------------------------------------------------------------------------


def sum_of(model: LanguageModel) -> float:
    return float(sum(value.double().sum() for value in model.state_dict().values()))


class Trainer:
    def __init__(self, size: TurnsSize) -> None:
        self._size = size
        with saver.region("weights", exportable=True):
            self.model = make_model(size)
        self.memory = saver.region("trainer", retain=True, exportable=True)
        with self.memory:
            for parameter in self.model.parameters():
                parameter.grad = torch.zeros_like(parameter)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4, fused=device.is_gpu())
        self._text = torch.tensor(encode(load_text()), device=saver.device)

    def step(self) -> float:
        starts = torch.randint(len(self._text) - self._size.tokens - 1, (self._size.batch, 1), device=saver.device)
        sequences = self._text[starts + torch.arange(self._size.tokens + 1, device=saver.device)]
        loss = cross_entropy(self.model(sequences[:, :-1]).flatten(0, 1), sequences[:, 1:].flatten())
        self._optimizer.zero_grad(set_to_none=False)
        loss.backward()
        with self.memory:
            self._optimizer.step()
        return loss.item()

    def states(self) -> list[torch.Tensor]:
        found: dict[Any, dict[str, Any]] = self._optimizer.state
        return [each[name] for each in found.values() for name in ("exp_avg", "exp_avg_sq")]

    def bytes(self) -> int:
        return sum(each.nbytes for each in (*self.states(), *(one.grad for one in self.model.parameters())))


def measure(sizes: Sizes) -> Measured:
    """Metric "turn": a step, a generation, and two hand-overs. `bytes` are the trainer's, which go and come back."""
    size = sizes.two_in_turns
    trainer, other = Trainer(size), Peer()
    losses = [trainer.step()]
    other.ask(make_engine, size, {name: saver.share(value) for name, value in trainer.model.state_dict().items()})
    saver.pause("trainer")
    fill_up(max(trainer.bytes(), size.blocks_bytes) + size.spare_bytes)
    saver.resume("trainer")
    measured, checker = Measured(bytes=trainer.bytes()), Checker()
    for turn in range(1, size.turns + 1):
        watch = Stopwatch()
        losses.append(trainer.step())
        weights = sum_of(trainer.model)
        is_checked = turn % CHECKED_EACH == 1
        before = checker.sums(trainer.states()) if is_checked else None
        other.start(generate, turn)
        saver.hand_over(pause="trainer", to=other.pid, timeout=PATIENCE_SECONDS)
        seen = other.answer()
        other.start(hand_back)
        saver.resume("trainer", timeout=PATIENCE_SECONDS)
        other.answer()
        if not is_checked:
            measured.add("turn", *watch.stop())
        elif checker.sums(trainer.states()) != before:
            measured.faults.append(f"turn {turn} changed the optimizer's states")
        if seen != weights:
            measured.faults.append(f"turn {turn}: the weights' sum is {weights} here and {seen} in the engine")
    other.stop()
    measured.facts = {
        "losses": losses[:: max(1, size.turns // 10)],
        "needed_bytes": trainer.bytes() + size.blocks_bytes,
        "room_bytes": max(trainer.bytes(), size.blocks_bytes) + size.spare_bytes,
    }
    return measured


def parts(_: Sizes) -> list[Part]:
    return [Part("trainer_and_engine.turns", measure, environment=peer.environment())]
