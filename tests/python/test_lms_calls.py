"""Large model support that recomputes: models of many kinds, slow and fast buses, what forbids it, what it meets."""

import copy
import gc
import pickle

import pytest

torch = pytest.importorskip("torch")

import lms_models  # noqa: E402
from ebbtide import torch_extension  # noqa: E402
from ebbtide.lms import calls, devices  # noqa: E402
from lms_calls import FAST, SLOW, STEPS, blocks_of, chain, chain_of_blocks, run, run_plainly, through  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

pytestmark = pytest.mark.sim_only


# On a fast bus all kinds do what batch_norms does on a slow one, but for those whose tensors have sizes of their own.
CASES = [*((kind, SLOW) for kind in lms_models.KINDS), ("gpt_autocast", FAST), ("experts", FAST), ("padded", FAST)]


@pytest.mark.parametrize(("kind", "rate"), CASES, ids=lambda value: {SLOW: "slow", FAST: "fast"}.get(value, value))
def test_losses_are_equal_and_the_limit_holds(within, second_runs, kind, rate):
    make = lms_models.KINDS[kind]
    plain = run_plainly(make)
    with within(make, rate=rate):
        assert run(make()) == plain
    if rate == SLOW and kind != "batch_norms":
        assert second_runs


def test_a_slow_bus_moves_little(lms, within):
    """How many blocks are computed again is for tests/cpp/step_choice_test.cpp."""
    with within(lms_models.gpt, 0.5):
        step = lms_models.gpt()
        run(step)
        before = lms.stats()["evicted_bytes"]
        run(step, 1)
        assert 0 < len(calls.recomputed()) <= 8
        assert lms.stats()["evicted_bytes"] - before < lms.limit / 4


@pytest.mark.parametrize("recompute", [False, "auto"])
def test_states_leave_where_that_costs_less(lms, lms_extension, within, recompute):
    def make():
        torch.manual_seed(0)
        model = nn.Sequential(*[lms_models.Block(64, 4) for _ in range(8)])
        optimizer = torch.optim.AdamW(model.parameters())
        step = chain(model)
        return lambda number: (step(number), optimizer.step())[0]

    with within(make, 0.8, recompute=recompute):
        run(make())
        assert bool(calls.recomputed()) == bool(recompute)
        away, planned = lms.stats()["state_host_bytes"], lms_extension.planned_state_bytes()
        assert away == 0 if recompute else away >= planned > 0, (away, planned, lms.report())


# --- what forbids it ---


def test_nothing_is_computed_twice_unless_asked_for(within, second_runs):
    plain = run_plainly(lms_models.gpt)
    with within(lms_models.gpt, recompute=False):
        assert run(lms_models.gpt()) == plain
    asked = []
    with within(lms_models.gpt, recompute=lambda module: asked.append(type(module))):
        run(lms_models.gpt())
        assert asked and not calls.refused()
    assert not second_runs


def test_the_program_allows_some_modules(lms, within, second_runs):
    with within(lms_models.gpt, recompute=lambda module: isinstance(module, nn.Sequential)):
        run(lms_models.gpt())
        assert second_runs and {name for name, _, _ in calls.recomputed()} == {"Sequential"}
        assert "recomputed in each step: Sequential" in lms.report()


def test_hooks_of_the_program_run_once_and_calls_inside_are_recomputed(lms, within, second_runs):
    seen = []

    def make():
        blocks = blocks_of()
        for block in blocks:
            block.register_forward_hook(lambda *_: seen.append(None))
        model = lms_models.Decoder(blocks, 64)
        return lms_models.language_step(model, torch.optim.SGD(model.parameters(), 0.1), 8, 32)

    plain = run(make())
    expected = len(seen)
    with within(make):
        seen.clear()
        assert run(make()) == plain
        assert len(seen) == expected and second_runs
        assert "Block" not in {name for name, _, _ in calls.recomputed()}
        assert calls.refused()["Block"] == "it has a forward hook"
        assert "not recomputed: Block" in lms.report()


@pytest.mark.parametrize("depth", [1, 2])
def test_all_that_can_not_be_recomputed_is_found_at_once(within, lms_extension, second_runs, monkeypatch, depth):
    """Each choice that is made anew is measured anew."""

    def make():
        blocks = blocks_of()
        for block in blocks:
            for hooked in [block, *block.children()][: None if depth == 2 else 1]:
                hooked.register_forward_hook(lambda *_: None)
        model = lms_models.Decoder(blocks, 64)
        return lms_models.language_step(model, torch.optim.SGD(model.parameters(), 0.1), 8, 32)

    asked, choose_again = [], lms_extension.choose_again
    monkeypatch.setattr(lms_extension, "choose_again", lambda: asked.append(choose_again()))
    with within(make):
        step = make()
        run(step)
        assert len(asked) == depth and bool(second_runs) == (depth == 1)
        assert len(calls._now.blocks._refused) >= 8 * depth


class Doubling(nn.Module):
    """Nothing saves its argument."""

    def __init__(self):
        super().__init__()
        self.body = lms_models.Block(64, 4)

    def forward(self, hidden):
        return self.body(hidden * 2.0)


def test_an_argument_that_is_changed_after_the_call(within):
    """No operation saves it, so that this works without recomputation, and with it."""

    def call(_, block, hidden):
        given = hidden + 0.0
        result = block(given)
        with torch.no_grad():
            given.zero_()
        return result

    plain = run(chain(blocks_of(Doubling), call))
    with within(lambda: chain(blocks_of(Doubling), call)):
        assert run(chain(blocks_of(Doubling), call)) == plain
        assert calls.refused().get("Doubling") == "an argument is changed in place after the call"


class Counting(nn.Module):
    """Its forward changes a buffer in training alone."""

    def __init__(self):
        super().__init__()
        self.body = lms_models.Block(64, 4)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, hidden):
        if self.training:
            self.count += 1
        return self.body(hidden)


def test_a_trial_counts_for_its_mode_alone(within, second_runs):
    def make():
        blocks = blocks_of(Counting)

        def call(index, block, hidden):
            return block.train(is_training[0])(hidden)

        return chain(blocks, call), blocks

    def train():
        step, blocks = make()
        is_training[0] = False
        losses = run(step)
        is_training[0] = True
        return losses + run(step), [block.count.item() for block in blocks]

    is_training = [False]
    plain = train()
    with within(lambda: make()[0]):
        assert train() == plain
    assert second_runs


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.norm = lms_models.Block(64, 4), nn.BatchNorm1d(32)

    def forward(self, hidden):
        return self.norm(self.body(hidden))


def test_running_statistics_of_two_graphs_move_once_each(within, second_runs):
    """Both forwards come before both backwards: the second one finds statistics that the first has not seen."""

    def train():
        blocks = blocks_of(Normed)

        def step(number):
            losses = [through(blocks).pow(2).mean() for _ in range(2)]
            sum(losses).backward()
            found = [loss.item() for loss in losses], blocks[0].norm.weight.grad.tolist()
            for block in blocks:
                block.zero_grad()
            return found

        return step, blocks

    def trained():
        step, blocks = train()
        return run(step), [[buffer.tolist() for buffer in block.norm.buffers()] for block in blocks]

    plain = trained()
    with within(lambda: train()[0]):
        assert trained() == plain
    assert second_runs


def test_graphs_that_are_kept_are_not_recomputed(within, second_runs):
    def backward(_, loss):
        loss.backward(retain_graph=True)
        loss.backward()

    def make():
        return chain(blocks_of(), backward=backward)

    plain = run(make())
    with within(make):
        assert run(make()) == plain
        assert calls.refused()["Block"].startswith("its graph is kept for another backward")
    assert not second_runs


def test_a_trial_whose_graph_is_dropped_is_made_again(within, second_runs):
    is_dropped = [True]

    def make():
        blocks = blocks_of()
        plain = chain(blocks)

        def step(number):
            if 1 <= number <= 2 and is_dropped[0]:  # a forward that a plan is for, and no backward
                through(blocks)
                return 0.0
            return plain(number)

        return step

    expected = run(make())
    with within(make):
        assert run(make()) == expected
    assert second_runs


def test_a_module_that_was_refused_and_is_gone(within, lms_extension):
    with within(chain_of_blocks):
        blocks = calls._now.blocks
        hooked = lms_models.Block(64, 4)
        blocks._refuse(hooked, "it has a forward hook")
        number = lms_extension.module_number(hooked)
        assert number in blocks._refused and lms_extension.module_number(hooked) == number
        del hooked
        gc.collect()
        assert number not in blocks._refused
        assert number not in {lms_extension.module_number(module) for module in blocks_of()}
        assert calls.refused() == {"Block": "it has a forward hook"}, "a report may come when the model is gone"


# --- what it meets ---


def test_checkpoints_of_the_program(within):
    def call(index, block, hidden):
        return checkpoint(block, hidden, use_reentrant=index % 4 == 0) if index % 2 == 0 else block(hidden)

    plain = run(chain(blocks_of(), call))
    with within(lambda: chain(blocks_of(), call), 0.7):
        assert run(chain(blocks_of(), call)) == plain


def test_errors_in_forward_and_backward_leave_the_next_steps_as_they_are(within):
    fails = [""]

    class Failing(Doubling):
        def forward(self, hidden):
            if fails[0] == "forward":
                raise ArithmeticError
            result = super().forward(hidden)
            if fails[0] == "backward":
                result.register_hook(fail)
            return result

    def fail(_):
        raise ArithmeticError

    def make():
        blocks = blocks_of(Failing)
        step = chain(blocks)

        def failing(number):
            fails[0] = {3: "forward", 5: "backward"}.get(number, "")
            try:
                return step(number)
            except ArithmeticError:
                return -1.0
            finally:
                for block in blocks:
                    block.zero_grad()

        return failing

    plain = run(make(), 9)
    with within(make):
        assert run(make(), 9) == plain


def test_models_are_copied_and_pickled_while_it_is_on(within):
    with within(lms_models.gpt):
        model = lms_models.Decoder(blocks_of(), 64)
        words = torch.randint(0, 200, (8, 32))
        for _ in range(5):
            model(words).pow(2).mean().backward()
        twin = pickle.loads(pickle.dumps(copy.deepcopy(model)))
        model.eval(), twin.eval()
        assert torch.equal(model(words), twin(words))
        model.zero_grad()
    assert nn.Module.__call__.__module__ == "torch.nn.modules.module"


def test_switched_off_between_forward_and_backward(lms, within):
    def make(number_off=None):
        def backward(number, loss):
            if number == number_off:
                lms.disable()
            loss.backward()

        return chain(blocks_of(), backward=backward)

    plain = run(make(), 6)
    with within(make):
        assert run(make(4), 6) == plain


def test_blocks_without_a_module_around_them(within, second_runs):
    plain = run_plainly(chain_of_blocks)
    with within(chain_of_blocks):
        assert run(chain_of_blocks()) == plain
        assert len(second_runs) > 2 * STEPS and not calls.refused()


def test_a_call_that_is_told_so_gives_the_cache_back_before_anything_else(lms, monkeypatch):
    extension, happened = torch_extension.load("_lms"), []
    told = [extension.GIVE_BACK, 0]

    class Scope:
        def __init__(self, *_):
            pass

        def __enter__(self):
            return told.pop(0)

        def __exit__(self, *_):
            pass

    class Called(nn.Module):
        def forward(self, x):
            happened.append("called")
            return x

    monkeypatch.setattr(devices.SimulatedDevice, "trim", lambda _: happened.append("given back"))
    with lms.enable(limit="1GiB"):
        monkeypatch.setattr(extension, "CallScope", Scope)
        monkeypatch.setattr(extension, "disturb_step", lambda: happened.append("disturbed"))
        happened.clear()
        for _ in range(2):
            Called()(torch.ones(1))
    assert happened[:4] == ["given back", "disturbed", "called", "called"]
