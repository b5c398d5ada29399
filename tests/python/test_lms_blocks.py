"""Large model support that recomputes: models of many kinds, slow and fast buses, what forbids it, what it meets."""

import copy
import gc
import pickle

import pytest

torch = pytest.importorskip("torch")

import lms_models  # noqa: E402
from ebbtide import torch_extension  # noqa: E402
from ebbtide.lms import blocks  # noqa: E402
from lms_model import SMALL  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

pytestmark = pytest.mark.sim_only

SLOW, FAST = 1e6, 1e12  # bytes a second
STEPS = 7


@pytest.fixture
def bus(lms):
    """A function: plans take the bus for so fast."""
    yield lambda rate: torch_extension.load("_lms").assume_rate(rate)
    torch_extension.load("_lms").assume_rate(0)


def run(step, steps=STEPS, before=lambda number: None):
    torch.manual_seed(1)
    found = []
    for number in range(steps):
        before(number)
        found.append(step(number))
    return found


def needed_bytes(lms, make, steps=2):
    with lms.enable(limit="4GiB", min_size=SMALL):
        run(make(), steps)
        return lms.stats()["peak_device_bytes"]


def second_runs(monkeypatch):
    """A list that gets an entry for each second run."""
    calls = []
    extension = torch_extension.load("_lms")
    plain = extension.note_demand

    def counted():
        calls.append(None)
        plain()

    monkeypatch.setattr(extension, "note_demand", counted)
    return calls


@pytest.mark.parametrize("rate", [SLOW, FAST], ids=["slow", "fast"])
@pytest.mark.parametrize("kind", lms_models.KINDS)
def test_losses_are_equal_and_the_limit_holds(lms, bus, monkeypatch, kind, rate):
    make = lms_models.KINDS[kind]
    plain = run(make())
    limit = int(0.6 * needed_bytes(lms, make))
    with lms.enable(limit=limit, min_size=SMALL, recompute="auto"):
        bus(rate)
        calls = second_runs(monkeypatch)
        assert run(make()) == plain
        assert lms.stats()["peak_device_bytes"] <= limit
        assert lms.stats()["host_bytes"] == 0
    if rate == SLOW and kind != "batch_norms":
        assert calls


def test_a_slow_bus_moves_little_and_recomputes_no_more_than_the_limit_asks_for(lms, bus):
    limit = {share: int(share * needed_bytes(lms, lms_models.gpt)) for share in (0.75, 0.5)}
    counts, moved = {}, {}
    for share in limit:
        with lms.enable(limit=limit[share], min_size=SMALL, recompute="auto"):
            bus(SLOW)
            step = lms_models.gpt()
            run(step)
            before = lms.stats()["evicted_bytes"]
            run(step, 1)
            counts[share], moved[share] = len(blocks.recomputed()), lms.stats()["evicted_bytes"] - before
    assert 0 < counts[0.75] < counts[0.5] <= 8
    assert moved[0.5] < limit[0.5] / 4


def test_nothing_happens_where_everything_fits(lms, bus, monkeypatch):
    with lms.enable(limit="2GiB", min_size=SMALL, recompute="auto"):
        bus(SLOW)
        calls = second_runs(monkeypatch)
        run(lms_models.gpt(depth=3))
        assert not calls and lms.stats()["evictions"] == 0 and not blocks.recomputed()


@pytest.mark.parametrize("allowed", [False, "a function"])
def test_the_program_forbids_it(lms, bus, monkeypatch, allowed):
    asked = []

    def is_allowed(module):
        asked.append(type(module).__name__)
        return False

    plain = run(lms_models.gpt())
    limit = int(0.6 * needed_bytes(lms, lms_models.gpt))
    with lms.enable(limit=limit, min_size=SMALL, recompute=allowed and is_allowed):
        bus(SLOW)
        calls = second_runs(monkeypatch)
        assert run(lms_models.gpt()) == plain
        assert not calls
    assert bool(asked) == bool(allowed)


def test_a_function_allows_some_modules(lms, bus, monkeypatch):
    limit = int(0.6 * needed_bytes(lms, lms_models.gpt))
    with lms.enable(limit=limit, min_size=SMALL, recompute=lambda module: isinstance(module, nn.Sequential)):
        bus(SLOW)
        calls = second_runs(monkeypatch)
        run(lms_models.gpt())
        assert calls and {name for name, _, _ in blocks.recomputed()} == {"Sequential"}
        assert "recomputed in each step: Sequential" in lms.report()


@pytest.mark.parametrize("wrong", [1.5, "yes", None])
def test_another_word_is_refused(lms, wrong):
    with pytest.raises(TypeError, match="recompute must be 'auto', False, or a function"):
        lms.enable(limit="1GiB", recompute=wrong)
    assert not lms.enabled


def tied(hook):
    """A step of a model whose blocks have a hook, or a counter, or a generator."""
    torch.manual_seed(0)
    blocks = [lms_models.Block(128, 4) for _ in range(8)]
    model = lms_models.Decoder(blocks, 128)
    for block in blocks:
        hook(block)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return lms_models._language_step(model, optimizer, 8, 128)


def test_hooks_of_the_program_run_once_and_calls_inside_are_recomputed(lms, bus, monkeypatch):
    seen = []

    def make():
        return tied(lambda block: block.register_forward_hook(lambda *_: seen.append(None)))

    plain = run(make())
    expected = len(seen)
    limit = int(0.6 * needed_bytes(lms, make))
    seen.clear()
    with lms.enable(limit=limit, min_size=SMALL, recompute="auto"):
        bus(SLOW)
        calls = second_runs(monkeypatch)
        assert run(make()) == plain
        assert len(seen) == expected
        assert calls and "Block" not in {name for name, _, _ in blocks.recomputed()}


def test_an_argument_that_is_changed_after_the_call(lms, bus, monkeypatch):
    """No operation saves it, so that this works without recomputation, and with it."""

    class Doubling(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = lms_models.Block(128, 4)

        def forward(self, hidden):
            return self.body(hidden * 2.0)

    def make():
        torch.manual_seed(0)
        blocks = nn.ModuleList(Doubling() for _ in range(8))

        def step(number):
            hidden = torch.randn(8, 128, 128)
            for block in blocks:
                given = hidden + 0.0
                hidden = block(given)
                with torch.no_grad():
                    given.zero_()
            loss = hidden.pow(2).mean()
            loss.backward()
            return loss.item()

        return step

    plain = run(make())
    limit = int(0.6 * needed_bytes(lms, make))
    with lms.enable(limit=limit, min_size=SMALL, recompute="auto"):
        bus(SLOW)
        assert run(make()) == plain
        assert blocks.reasons().get("Doubling") == "an argument is changed in place after the call"


def test_checkpoints_of_the_program(lms, bus):
    def make():
        torch.manual_seed(0)
        model = lms_models.Decoder([lms_models.Block(128, 4) for _ in range(8)], 128)

        def step(number):
            hidden = model.embed(torch.randint(0, 200, (8, 128)))
            for index, block in enumerate(model.blocks):
                hidden = checkpoint(block, hidden, use_reentrant=index % 4 == 0) if index % 2 == 0 else block(hidden)
            loss = model.head(model.norm(hidden)).pow(2).mean()
            loss.backward()
            return loss.item()

        return step

    plain = run(make())
    limit = int(0.7 * needed_bytes(lms, make))
    with lms.enable(limit=limit, min_size=SMALL, recompute="auto"):
        bus(SLOW)
        assert run(make()) == plain


def test_errors_in_forward_and_backward_leave_the_next_steps_as_they_are(lms, bus):
    class Failing(nn.Module):
        fails = ""

        def __init__(self):
            super().__init__()
            self.body = lms_models.Block(128, 4)

        def forward(self, hidden):
            if self.fails == "forward":
                raise ArithmeticError(self.fails)
            out = self.body(hidden)
            if self.fails == "backward":
                out.register_hook(lambda _: (_ for _ in ()).throw(ArithmeticError("backward")))
            return out

    def make():
        torch.manual_seed(0)
        blocks = nn.ModuleList(Failing() for _ in range(8))

        def step(number):
            hidden = torch.randn(8, 128, 128)
            Failing.fails = {3: "forward", 5: "backward"}.get(number, "")
            try:
                for block in blocks:
                    hidden = block(hidden)
                loss = hidden.pow(2).mean()
                loss.backward()
            except ArithmeticError:
                return -1.0
            finally:
                blocks.zero_grad()
            return loss.item()

        return step

    plain = run(make(), 9)
    limit = int(0.6 * needed_bytes(lms, make))
    with lms.enable(limit=limit, min_size=SMALL, recompute="auto"):
        bus(SLOW)
        assert run(make(), 9) == plain
        gc.collect()
        assert lms.stats()["host_bytes"] == 0


def test_models_are_copied_and_pickled_while_it_is_on(lms, bus):
    limit = int(0.6 * needed_bytes(lms, lms_models.gpt))
    with lms.enable(limit=limit, min_size=SMALL, recompute="auto"):
        bus(SLOW)
        model = lms_models.Decoder([lms_models.Block(128, 4) for _ in range(8)], 128)
        words = torch.randint(0, 200, (8, 128))
        for _ in range(5):
            model(words).pow(2).mean().backward()
        twin = pickle.loads(pickle.dumps(copy.deepcopy(model)))
        model.eval(), twin.eval()
        assert torch.equal(model(words), twin(words))
    plain = nn.Module.__call__
    assert plain.__module__ == "torch.nn.modules.module"


def test_switched_off_between_forward_and_backward(lms, bus):
    plain = run(lms_models.gpt(), 6)
    limit = int(0.6 * needed_bytes(lms, lms_models.gpt))
    torch.manual_seed(0)
    model = lms_models.Decoder([lms_models.Block(128, 4) for _ in range(8)], 128)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    lms.enable(limit=limit, min_size=SMALL, recompute="auto")
    bus(SLOW)
    torch.manual_seed(1)
    found = []
    for number in range(6):
        words = torch.randint(0, 200, (8, 128))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(words).flatten(0, 1), words.flatten())
        if number == 4:
            lms.disable()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    assert found == plain


def test_blocks_without_a_module_around_them(lms, bus, monkeypatch):
    def make():
        torch.manual_seed(0)
        model = [lms_models.Block(128, 4) for _ in range(8)]

        def step(number):
            hidden = torch.randn(8, 128, 128)
            for block in model:
                hidden = block(hidden)
            loss = hidden.pow(2).mean()
            loss.backward()
            for block in model:
                block.zero_grad()
            return loss.item()

        return step

    plain = run(make())
    limit = int(0.6 * needed_bytes(lms, make))
    with lms.enable(limit=limit, min_size=SMALL, recompute="auto"):
        bus(SLOW)
        calls = second_runs(monkeypatch)
        assert run(make()) == plain
        assert len(calls) > 2 * STEPS and not blocks.reasons()
