"""Random programs against a plain model: memory holds what the model says, whatever the order of operations."""

import gc

import pytest

torch = pytest.importorskip("torch")

from ebbtide import _core, saver  # noqa: E402
from ebbtide.errors import StateError  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from hypothesis.stateful import (  # noqa: E402
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
)

TAGS = st.sampled_from(["x", "y"])
BACKUPS = st.sampled_from(["ram", None])
# Segments of 2 and 20 MiB that are split, and one that a tensor has for itself.
SIZES = st.sampled_from([1000, 600_000, 3_000_000])
VALUES = st.integers(min_value=1, max_value=100)


class Held:
    """One tensor in the model. Its value counts while it is resident or stored, and is 0 once it was dropped."""

    def __init__(self, tensor, tag, backup, value):
        self.tensor, self.tag, self.backup, self.value = tensor, tag, backup, float(value)
        self.address = tensor.data_ptr()
        self.is_away = False


class Program(RuleBasedStateMachine):
    tensors = Bundle("tensors")

    @initialize()
    def begin(self):
        self.held = []
        self.scopes = []

    def name(self, tag):
        return f"property-{tag}"  # the same in each run, so that memory is reused

    def leased(self):
        return {tag for tag, _, scope in self.scopes if tag is not None}

    @precondition(lambda self: len(self.held) < 12)
    @rule(target=tensors, tag=TAGS, backup=BACKUPS, size=SIZES, value=VALUES)
    def allocate_in_a_region(self, tag, backup, size, value):
        with saver.region(self.name(tag), backup=backup) as scope:
            self.scopes.append((tag, backup, scope))
            try:
                return self.allocate_here(size, value)
            finally:
                self.scopes.pop()

    @precondition(lambda self: len(self.held) < 12)
    @rule(target=tensors, size=SIZES, value=VALUES)
    def allocate(self, size, value):
        return self.allocate_here(size, value)

    def allocate_here(self, size, value):
        tensor = torch.full((size,), float(value), device=saver.device)
        tag, backup, _ = self.scopes[-1] if self.scopes else (None, None, None)
        info = _core.find(tensor.data_ptr())
        assert (None if info is None else info.tag) == (None if tag is None else self.name(tag))
        held = Held(tensor, tag, backup, value)
        self.held.append(held)
        return held

    @precondition(lambda self: len(self.scopes) < 3)
    @rule(tag=TAGS, backup=BACKUPS, threads=st.sampled_from(["own", "all"]))
    def enter(self, tag, backup, threads):
        scope = saver.region(self.name(tag), backup=backup, threads=threads)
        scope.__enter__()
        self.scopes.append((tag, backup, scope))

    @precondition(lambda self: 0 < len(self.scopes) < 3)
    @rule()
    def disable(self):
        scope = saver.disabled()
        scope.__enter__()
        self.scopes.append((None, None, scope))

    @precondition(lambda self: self.scopes)
    @rule(count=st.integers(min_value=1, max_value=3))
    def leave(self, count):
        for _ in range(min(count, len(self.scopes))):
            self.scopes.pop()[2].__exit__(None, None, None)

    @rule(held=tensors, value=VALUES)
    def write(self, held, value):
        if held.tensor is not None and not held.is_away:
            held.tensor.fill_(value)
            held.value = float(value)

    @rule(held=consumes(tensors))
    def free(self, held):
        held.tensor = None
        self.held = [other for other in self.held if other is not held]
        gc.collect(0)

    @precondition(lambda self: self.held)
    @rule(tags=st.lists(TAGS, max_size=2), this_once=st.sampled_from(["as allocated", "ram", None]))
    def pause(self, tags, this_once):
        options = {} if this_once == "as allocated" else {"backup": this_once}
        names = [self.name(tag) for tag in tags] or [self.name(tag) for tag in "xy"]
        chosen = set(tags or "xy")
        if chosen & self.leased():
            with pytest.raises(StateError):
                saver.pause(*names, missing_ok=True, **options)
            return
        saver.pause(*names, missing_ok=True, **options)
        for held in self.held:
            if held.tag in chosen and not held.is_away:
                held.is_away = True
                if (held.backup if this_once == "as allocated" else this_once) is None:
                    held.value = 0.0

    @rule(tags=st.lists(TAGS, max_size=2))
    def resume(self, tags):
        saver.resume(*(self.name(tag) for tag in tags or "xy"), missing_ok=True)
        for held in self.held:
            if held.tag in set(tags or "xy"):
                held.is_away = False

    @invariant()
    def memory_is_what_the_model_says(self):
        for held in getattr(self, "held", ()):
            assert held.tensor.data_ptr() == held.address
            if held.tag is not None:
                assert _core.is_away(held.address, held.tensor.nbytes) == held.is_away
            if not held.is_away:
                assert float(held.tensor[0]) == float(held.tensor[-1]) == held.value

    def teardown(self):
        while getattr(self, "scopes", None):
            self.leave(3)
        saver.resume()
        for held in getattr(self, "held", ()):
            assert bool((held.tensor == held.value).all())
        assert all(status.lease_count == 0 for status in saver.tags().values())


Program.TestCase.settings = settings(
    max_examples=25, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


class TestRandomPrograms(Program.TestCase):
    """Driven by hypothesis."""
