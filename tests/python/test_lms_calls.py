"""Large model support that recomputes: models of many kinds, slow and fast buses, what forbids it, what it meets."""

import copy
import functools
import gc
import pickle
import random
import weakref
from contextlib import contextmanager

import pytest

torch = pytest.importorskip("torch")

import lms_models  # noqa: E402
from ebbtide import lms, torch_extension  # noqa: E402
from ebbtide.lms import calls  # noqa: E402
from lms_model import SMALL, computed_once  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

pytestmark = pytest.mark.sim_only

SLOW, FAST = 1e6, 1e12  # bytes a second
STEPS = 7


def run(step, steps=STEPS):
    torch.manual_seed(1)
    return [step(number) for number in range(steps)]


run_plainly = computed_once(lambda make: run(make()))


def blocks_of(kind=lambda: lms_models.Block(64, 4), count=8):
    torch.manual_seed(0)
    return [kind() for _ in range(count)]


def through(blocks):
    return functools.reduce(lambda hidden, block: block(hidden), blocks, torch.randn(4, 128, 64))


def chain(blocks, call=lambda number, block, hidden: block(hidden)):
    """A step that calls the blocks one after the other, without a module around them."""

    def step(number):
        hidden = torch.randn(4, 128, 64)
        for index, block in enumerate(blocks):
            hidden = call(index, block, hidden)
        loss = hidden.pow(2).mean()
        for block in blocks:
            block.zero_grad()
        loss.backward()
        return loss.item()

    return step


def chain_of_blocks():
    return chain(blocks_of())


@functools.cache
def peak_of(make):
    """The device bytes of a training that needs to move nothing. A process measures them once."""
    with lms.enable(limit="4GiB", min_size=SMALL):
        run(make(), 2)
        return lms.stats()["peak_device_bytes"]


@pytest.fixture
def extension(lms):
    module = torch_extension.load("_lms")
    yield module
    module.assume_rate(0)


@pytest.fixture
def within(lms, extension):
    """A function: LMS on, within a share of what a training needs. Plans take the bus for so fast."""

    @contextmanager
    def enter(make, share=0.6, rate=SLOW, **options):
        limit = int(share * peak_of(make))
        with lms.enable(limit=limit, min_size=SMALL, **{"recompute": "auto", **options}):
            extension.assume_rate(rate)
            yield
            assert lms.stats()["peak_device_bytes"] <= limit
            gc.collect()
            assert lms.stats()["host_bytes"] == 0

    return enter


@pytest.fixture
def second_runs(extension, monkeypatch):
    """A list that gets an entry for each second run."""
    runs, plain = [], extension.note_demand
    monkeypatch.setattr(extension, "note_demand", lambda: (runs.append(None), plain()))
    return runs


@pytest.mark.parametrize("rate", [SLOW, FAST], ids=["slow", "fast"])
@pytest.mark.parametrize("kind", lms_models.KINDS)
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
def test_states_leave_where_that_costs_less(lms, extension, within, recompute):
    def make():
        torch.manual_seed(0)
        model = nn.Sequential(*[lms_models.Block(64, 4) for _ in range(8)])
        optimizer = torch.optim.AdamW(model.parameters())
        step = chain(model)
        return lambda number: (step(number), optimizer.step())[0]

    with within(make, 0.8, recompute=recompute):
        run(make())
        assert bool(calls.recomputed()) == bool(recompute)
        away = lms.stats()["state_host_bytes"]
        assert away == 0 if recompute else away >= extension.planned_state_bytes() > 0


def test_nothing_happens_where_everything_fits(lms, extension, second_runs):
    with lms.enable(limit="2GiB", min_size=SMALL, recompute="auto"):
        extension.assume_rate(SLOW)
        run(lms_models.gpt(depth=3))
        assert not second_runs and lms.stats()["evictions"] == 0 and not calls.recomputed()
        assert extension.is_resting()


def test_a_program_that_fitted_is_followed_again_once_it_does_not(within, extension, second_runs):
    def make():
        step = lms_models.gpt()
        small = lms_models.gpt(depth=2)
        return lambda number: (step if number > 3 else small)(number)

    plain = run(make(), 10)
    with within(lms_models.gpt):
        step = make()
        torch.manual_seed(1)
        losses = [step(number) for number in range(4)]
        assert extension.is_resting()
        losses += [step(number) for number in range(4, 10)]
        assert losses == plain and not extension.is_resting()
        assert calls.recomputed() and second_runs


def test_another_limit_ends_the_rest(lms, extension):
    needed = peak_of(lms_models.gpt)
    with lms.enable(limit="2GiB", min_size=SMALL):
        step = lms_models.gpt()
        run(step)
        assert extension.is_resting()
        lms.limit = int(0.6 * needed)
        step(0)
        assert not extension.is_resting()


class DynamicLayer:
    """Of a cache, as transformers has them."""

    def __init__(self):
        self.keys = None

    def get_seq_length(self):
        return 0 if self.keys is None else self.keys.shape[1]

    def update(self, keys):
        self.keys = keys.clone() if self.keys is None else torch.cat([self.keys, keys], 1)
        return self.keys


class DynamicCache:
    def __init__(self):
        self.layers = []

    def get_seq_length(self, place=0):
        return self.layers[place].get_seq_length() if place < len(self.layers) else 0

    def update(self, keys, place):
        while len(self.layers) <= place:
            self.layers.append(DynamicLayer())
        return self.layers[place].update(keys)


DynamicLayer.__module__ = DynamicCache.__module__ = "transformers.cache_utils"


class Decoder(lms_models.Block):
    layer_idx = 0

    def forward(self, hidden, cache):
        return super().forward(cache.update(hidden, self.layer_idx))


@pytest.mark.parametrize("is_kept", [False, True], ids=["dropped", "used by the loss"])
def test_layers_that_fill_a_cache_are_recomputed_and_the_cache_stays(within, second_runs, is_kept):
    def make():
        blocks = blocks_of(lambda: Decoder(64, 4))
        for number, block in enumerate(blocks):
            block.layer_idx = number

        def step(number):
            hidden, cache = torch.randn(4, 128, 64), DynamicCache()
            for block in blocks:
                hidden = block(hidden, cache)
            loss = hidden.pow(2).mean()
            if is_kept:
                assert [layer.get_seq_length() for layer in cache.layers] == [128] * len(blocks)
                loss = loss + sum(layer.keys.pow(2).mean() for layer in cache.layers)
            del cache
            for block in blocks:
                block.zero_grad()
            loss.backward()
            return loss.item(), blocks[0].feed[0].weight.grad.sum().item()

        return step

    plain = run_plainly(make)
    with within(make):
        assert run(make()) == plain
        assert "Decoder" in {name for name, *_ in calls.recomputed()}
    assert second_runs


def test_buffers_that_change_before_backward_forbid_it(within, second_runs):
    class Scaled(lms_models.Block):
        def __init__(self, *sizes):
            super().__init__(*sizes)
            self.register_buffer("scale", torch.ones(64))

        def forward(self, hidden):
            return super().forward(hidden + self.scale)

    def make():
        blocks = blocks_of(lambda: Scaled(64, 4))

        def step(number):
            hidden = torch.randn(4, 128, 64)
            for block in blocks:
                hidden = block(hidden)
            for block in blocks:
                block.scale.mul_(0.9)
                block.zero_grad()
            loss = hidden.pow(2).mean()
            loss.backward()
            return loss.item()

        return step

    plain = run_plainly(make)
    with within(make):
        assert run(make()) == plain
        assert calls.refused()["Scaled"] == "scale is changed in place after the call"


def test_a_kept_graph_forbids_all_blocks_of_a_kind_at_once(lms, within):
    def make():
        blocks = blocks_of()

        def step(number):
            hidden = torch.randn(4, 128, 64)
            for block in blocks:
                hidden = block(hidden)
                block.zero_grad()
            loss = hidden.pow(2).mean()
            loss.backward(retain_graph=True)
            loss.backward()
            return loss.item()

        return step

    plain = run_plainly(make)
    with within(make):
        assert run(make()) == plain
        assert "kept for another backward" in calls.refused()["Block"]
        assert "Block" not in {name for name, *_ in calls.recomputed()}


def test_a_class_for_each_instance_is_not_kept(within):
    """As torch's parametrizations make them."""
    kinds = []

    def make_block():
        kind = type("Block", (lms_models.Block,), {})
        kinds.append(weakref.ref(kind))
        return kind(64, 4)

    def make():
        return chain(blocks_of(make_block))

    with within(make):
        run(make())
    gc.collect()
    assert not any(kind() for kind in kinds)


class SometimesLeftOut(lms_models.Block):
    rate = 0.0

    def forward(self, hidden):
        return hidden if self.rate and random.random() < self.rate else super().forward(hidden)


def test_blocks_that_python_leaves_out_at_random_are_the_same_in_backward(within, second_runs):
    """From the fourth step on, when trials are over."""

    def make():
        random.seed(0)
        blocks = blocks_of(lambda: SometimesLeftOut(64, 4))
        step = chain(blocks)

        def run_one(number):
            for block in blocks:
                block.rate = 0.5 if number > 2 else 0.0
            return step(number)

        return run_one

    plain = run_plainly(make)
    with within(make):
        assert run(make()) == plain
    assert second_runs


def test_a_profile_shows_what_moves_and_what_is_computed_again(within):
    for rate, names in ((SLOW, {"ebbtide::recompute Block"}), (FAST, {"ebbtide::evict", "ebbtide::load"})):
        with within(lms_models.gpt, rate=rate):
            step = lms_models.gpt()
            run(step)
            with torch.profiler.profile() as profile:
                step(0)
        assert names <= {event.name for event in profile.events()}


# --- plans of other runs ---


def test_a_saved_plan_is_followed(lms, within, extension, tmp_path):
    step, file = lms_models.gpt(), tmp_path / "plan.json"
    with within(lms_models.gpt, 0.7):
        run(step)
        lms.save_plan(file)
        saved = calls.read_plan(file)
    # The bus is so fast that another choice is better.
    with within(lms_models.gpt, 0.7, FAST, plan=file):
        run(step)
        assert {key for _, key in extension.chosen_calls()} == set(saved.calls) != set()
    with within(lms_models.gpt, 0.7, FAST):
        run(step)
        assert {key for _, key in extension.chosen_calls()} != set(saved.calls)


@pytest.mark.parametrize("text", ["", "[]", '{"format": "another"}', '{"format": "ebbtide.lms plan 1"}'])
def test_another_file_is_no_plan(lms, tmp_path, text):
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(ValueError, match="is no plan that "):
        lms.enable(limit="1GiB", plan=tmp_path / "plan.json")
    with pytest.raises(FileNotFoundError):
        lms.enable(limit="1GiB", plan=tmp_path / "missing.json")
    assert not lms.enabled


# --- what may be evicted ---


class Left(nn.Module):
    """A module without others inside, so that reports list what it saves under its name."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64) / 8)

    def forward(self, hidden):
        return torch.nn.functional.gelu(hidden @ self.weight)


class Kept(Left):
    pass


def test_plans_leave_out_what_the_program_keeps(within, extension):
    def make():
        torch.manual_seed(0)
        return chain([Kept() if number < 6 else Left() for number in range(48)])

    plain = run_plainly(make)
    # Those that are saved first leave first, but for the rule.
    with within(make, 0.7, recompute=False, evict=lambda module: not isinstance(module, Kept)):
        assert run(make()) == plain
        evicted = {(extension.module_class(number), row[1] > 0) for number, *row in extension.step_report()[2]}
        assert ("Left", True) in evicted and ("Kept", True) not in evicted


def test_without_evictions_plans_recompute(lms, within, second_runs):
    def make():
        return chain(blocks_of(count=16))

    with within(make, 0.7, FAST, evict=False):
        step = make()
        run(step)
        before = lms.stats()["evicted_bytes"]
        run(step, 2)
        assert second_runs and lms.stats()["evicted_bytes"] == before


def test_what_the_program_keeps_leaves_before_an_allocation_fails(lms, within):
    with within(lms_models.gpt, evict=False, recompute=False):
        assert run(lms_models.gpt()) == run_plainly(lms_models.gpt)
        assert lms.stats()["evictions"] > 0


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
        return lms_models.language_step(model, torch.optim.SGD(model.parameters(), 0.1), 4, 128)

    plain = run(make())
    expected = len(seen)
    with within(make):
        seen.clear()
        assert run(make()) == plain
        assert len(seen) == expected and second_runs
        assert "Block" not in {name for name, _, _ in calls.recomputed()}
        assert calls.refused()["Block"] == "it has a forward hook"
        assert "not recomputed: Block" in lms.report()


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


class Normed(nn.Module):
    """Its forward changes a buffer in training alone."""

    def __init__(self):
        super().__init__()
        self.body, self.norm = lms_models.Block(64, 4), nn.BatchNorm1d(128)

    def forward(self, hidden):
        return self.norm(self.body(hidden))


def test_a_trial_counts_for_its_mode_alone(within, second_runs):
    def make():
        blocks = blocks_of(Normed)

        def call(index, block, hidden):
            return block.train(is_training[0])(hidden)

        return chain(blocks, call), blocks

    def train():
        step, blocks = make()
        is_training[0] = False
        losses = run(step)
        is_training[0] = True
        return losses + run(step), [block.norm.running_mean.tolist() for block in blocks]

    is_training = [False]
    plain = train()
    with within(lambda: make()[0]):
        assert train() == plain
    assert second_runs


def test_graphs_that_are_kept_are_not_recomputed(within, second_runs):
    def make():
        blocks = blocks_of()

        def step(number):
            hidden = through(blocks)
            loss = hidden.pow(2).mean()
            loss.backward(retain_graph=True)
            loss.backward()
            found = loss.item(), blocks[0].first.weight.grad.sum().item()
            for block in blocks:
                block.zero_grad()
            return found

        return step

    plain = run(make())
    with within(make):
        assert run(make()) == plain
        assert calls.refused()["Block"].startswith("its graph is kept")
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


def test_a_module_that_was_refused_and_is_gone(within, extension):
    with within(chain_of_blocks):
        blocks = calls._now.blocks
        hooked = lms_models.Block(64, 4)
        blocks._refuse(hooked, "it has a forward hook")
        number = extension.module_number(hooked)
        assert number in blocks._refused and extension.module_number(hooked) == number
        del hooked
        gc.collect()
        assert number not in blocks._refused
        assert number not in {extension.module_number(module) for module in blocks_of()}
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
        words = torch.randint(0, 200, (4, 128))
        for _ in range(5):
            model(words).pow(2).mean().backward()
        twin = pickle.loads(pickle.dumps(copy.deepcopy(model)))
        model.eval(), twin.eval()
        assert torch.equal(model(words), twin(words))
        model.zero_grad()
    assert nn.Module.__call__.__module__ == "torch.nn.modules.module"


def test_switched_off_between_forward_and_backward(lms, within):
    def make(number_off):
        blocks = blocks_of()

        def step(number):
            hidden = through(blocks)
            loss = hidden.pow(2).mean()
            if number == number_off:
                lms.disable()
            loss.backward()
            found = loss.item(), blocks[0].first.weight.grad.sum().item()
            for block in blocks:
                block.zero_grad()
            return found

        return step

    plain = run(make(None), 6)
    with within(lambda: make(None)):
        assert run(make(4), 6) == plain


def test_blocks_without_a_module_around_them(within, second_runs):
    plain = run_plainly(chain_of_blocks)
    with within(chain_of_blocks):
        assert run(chain_of_blocks()) == plain
        assert len(second_runs) > 2 * STEPS and not calls.refused()
