"""The context of operations: the model, the threads, and random choices that many operations share."""

from random import Random
from typing import Any

from ebbtide import saver

from . import perturb
from .actors import Actors
from .device import CAPACITY, IS_SIM, Simulator
from .model import Memory, Model, Policy, Skip

ACTORS = 3
POLICIES = (
    ("a", "ram", False, None),
    ("a", "ram", False, None),
    ("a", None, False, None),
    ("b", "ram", True, None),
    ("b", "disk", True, None),
    ("c", "pinned", False, None),
    ("c", "disk", False, None),
    ("d", None, False, None),
    ("d", "pinned", True, None),
    ("e", "ram", False, "split"),
    ("e", "disk", False, "split"),
    ("e", None, False, "split"),
    ("f", "ram", True, "whole"),
    ("f", "pinned", False, "whole"),
    ("f", None, False, "whole"),
)


WAITS = (None, "cuStreamSynchronize", "cuCtxSynchronize", "cuEventQuery")


class World:
    """The world of one walk. Its tags have a prefix of their own, because the core keeps tags for the life of the
    process. `waits_may_fail`: faults may hit functions that wait for the device. Memory that the device may still use
    is then kept for ever, so only the other walks can detect leaks of host memory."""

    def __init__(self, prefix: str, waits_may_fail: bool) -> None:
        self.prefix = prefix
        functions = perturb.DRIVER_FUNCTIONS
        self.faulty = [one for one in functions if waits_may_fail or one not in WAITS]
        self.model = Model(ACTORS)
        self.actors = Actors(ACTORS)
        self.simulator = Simulator() if IS_SIM else None
        if self.simulator is not None:
            self.simulator.set_capacity(CAPACITY)
        self.unraisable: list[str] = []
        self.calls_of_hooks: list[tuple[int, str, str]] = []
        self.was_interrupted = False  # of the last step
        self.last_step = ""
        self.checks = 0
        self.ends_paused = False
        self.is_bound_by_limit = not IS_SIM

    def tag(self, letter: str) -> str:
        return f"{self.prefix}-{letter}"

    def draw_policy(self, rng: Random) -> list[Any]:
        """The arguments of a region in a form that JSON can hold."""
        letter, backup, retain, overflow = rng.choice(POLICIES)
        # On a GPU, torch's version decides which threads' allocations a region for all threads takes beside another
        # region.
        threads = "all" if rng.random() < 0.15 and IS_SIM else "own"
        return [self.tag(letter), backup, retain, overflow, threads]

    def make_region(self, policy: Policy) -> Any:
        return saver.region(
            policy.tag,
            backup=policy.backup,  # type: ignore[arg-type]
            retain=policy.retain,
            overflow=policy.overflow,  # type: ignore[arg-type]
            threads=policy.threads,  # type: ignore[arg-type]
        )

    def draw_actor(self, rng: Random) -> int:
        return rng.choice((0, 0, 0, 1, 2))

    def draw_tags(self, rng: Random, *, may_be_none: bool = True) -> list[str]:
        """Some known tags; an empty list means all of them."""
        known = self.model.known_tags()
        if not known or (may_be_none and rng.random() < 0.15):
            return []
        return rng.sample(known, rng.choice((1, 1, 1, 2, min(3, len(known)))) if len(known) > 2 else 1)

    def draw_memory(self, rng: Random, **wanted: bool) -> int | None:
        """The number of a memory with these properties, such as is_paused=False."""
        found = [
            number
            for number, memory in self.model.memories.items()
            if all(bool(getattr(memory, name)) == value for name, value in wanted.items())
        ]
        return rng.choice(found) if found else None

    def draw_trouble(self, rng: Random, actor: int, tags: list[str], events: tuple[str, ...] = ()) -> list[Any] | None:
        """The perturbation of the next call; mostly none."""
        roll = rng.random()
        if roll < 0.06 and IS_SIM:
            function = rng.choice(self.faulty)
            k = rng.randint(1, 40) if function is None else rng.randint(1, 6)
            return ["fault", function, k, rng.choice(perturb.DRIVER_CODES), rng.choice((1, 1, 1, 3, 0))]
        if roll < 0.12 and actor == 0:
            return ["interrupt", int(rng.paretovariate(0.5)) if rng.random() < 0.5 else rng.randint(1, 900)]
        if roll < 0.16 and events:
            return ["hook", rng.choice(events), rng.choice([*tags, "*"])]
        return None

    def is_leased(self, tags: list[str]) -> bool:
        """Whether any of these tags (or any tag, if there are none) has its region open."""
        leased = self.model.routes.leased_tags()
        return bool(leased & set(tags)) if tags else bool(leased)

    def is_unknown(self, tags: list[str]) -> bool:
        return any(tag not in self.model.named for tag in tags)

    def forget(self, number: int) -> Memory:
        """Removes a memory from the model. It dies when the caller drops the result."""
        if number not in self.model.memories:
            raise Skip
        return self.model.memories.pop(number)

    def close_all(self) -> None:
        """Leaves every region, innermost first, and ends every generator."""
        self.model.generators.clear()
        for actor, scopes in enumerate(self.model.routes.scopes):
            while scopes:
                scope = scopes[-1]
                self.model.routes.close(actor, scope)
                leave = scope.generator.close if scope.generator is not None else _leaver(scope.manager)
                self.actors.run(actor, leave)


def _leaver(manager: Any) -> Any:
    return lambda: manager.__exit__(None, None, None)
