"""Large model support that recomputes: programs that fit, caches, what may be evicted."""

import gc
import random
import threading
import time
import weakref

import pytest

torch = pytest.importorskip("torch")

import lms_models  # noqa: E402
from ebbtide.lms import calls, control  # noqa: E402
from ebbtide.lms.recompute.second_runs import DRAWS  # noqa: E402
from lms_calls import FAST, SLOW, blocks_of, chain, chain_of_blocks, run, run_plainly  # noqa: E402
from lms_model import SMALL  # noqa: E402
from torch import nn  # noqa: E402

pytestmark = pytest.mark.sim_only


def is_followed(extension):
    """Whether calls are, as they are not where steps fit."""
    return bool(extension.wanted_of_call(torch.nn.Identity()) & extension.SCOPE)


def test_nothing_happens_where_everything_fits_until_the_limit_changes(lms, lms_extension, second_runs):
    with lms.enable(limit="2GiB", min_size=SMALL, recompute="auto"):
        lms_extension.assume_rate(SLOW)
        run(lms_models.gpt(depth=3))
        assert not second_runs and lms.stats()["evictions"] == 0 and not calls.recomputed()
        assert not is_followed(lms_extension)
        lms.limit = lms.stats()["peak_device_bytes"]
        assert is_followed(lms_extension), "the calls of the next step are followed"


# Three steps that fit, the end of the third, and four in which it may follow the plan of an earlier model of its names.
SETTLED = 8


def test_a_program_that_fitted_is_followed_again_once_it_does_not(lms, within, lms_extension, second_runs):
    def make():
        small, large = lms_models.gpt(depth=1), lms_models.gpt()
        return lambda number: (large if number >= SETTLED else small)(number)

    plain = run(make(), SETTLED + 6)
    with within(lms_models.gpt):
        step = make()
        losses = run(step, SETTLED)
        assert not is_followed(lms_extension), f"{lms_extension.statistics()}\n{lms.report()}"
        losses.append(step(SETTLED))
        assert is_followed(lms_extension), "from the end of the step that was short"
        losses += [step(number) for number in range(SETTLED + 1, SETTLED + 6)]
        assert losses == plain and is_followed(lms_extension)
        assert calls.recomputed() and second_runs


def test_a_shortage_where_nothing_is_saved_ends_the_rest_at_once(within, lms_extension):
    with within(lms_models.gpt):
        run(lms_models.gpt(depth=1), SETTLED)
        assert not is_followed(lms_extension)
        torch.empty(1 << 30, dtype=torch.uint8)  # lies on the host
        assert is_followed(lms_extension)


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


class ReadsAnother(Decoder):
    """From the fifth block on, as the last layers of some models share the keys of an earlier one."""

    def forward(self, hidden, cache):
        shared = cache.layers[0].keys if self.layer_idx > 4 else hidden
        return super().forward(hidden + shared, cache)


@pytest.mark.parametrize("is_kept", [False, True], ids=["dropped", "used by the loss"])
def test_layers_that_fill_a_cache_are_recomputed_and_the_cache_stays(within, second_runs, is_kept):
    def make():
        blocks = blocks_of(lambda: ReadsAnother(64, 4))
        for number, block in enumerate(blocks):
            block.layer_idx = number

        def step(number):
            hidden, cache = torch.randn(8, 32, 64), DynamicCache()
            for block in blocks:
                hidden = block(hidden, cache)
            loss = hidden.pow(2).mean()
            if is_kept:
                assert [layer.get_seq_length() for layer in cache.layers] == [32] * len(blocks)
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
        assert "ReadsAnother" in {name for name, *_ in calls.recomputed()}
    assert second_runs


class Scaled(lms_models.Block):
    """Its buffer has no effect where `is_used` is False."""

    def __init__(self, is_used):
        super().__init__(64, 4)
        self.is_used = is_used
        self.register_buffer("scale", torch.ones(64))

    def forward(self, hidden):
        return super().forward(hidden + self.scale if self.is_used else hidden)


def chain_that_changes_buffers(is_used, begins):
    blocks = blocks_of(lambda: Scaled(is_used))

    def backward(number, loss):
        if number >= begins:
            for block in blocks:
                block.scale.mul_(0.9)
        loss.backward()

    return chain(blocks, backward=backward)


def test_buffers_that_change_before_backward_forbid_it(within):
    def make():
        return chain_that_changes_buffers(True, 0)

    plain = run_plainly(make)
    with within(make):
        assert run(make()) == plain
        assert calls.refused()["Scaled"] == "scale is changed in place after the call"


def test_a_change_before_backward_raises_once(within, second_runs):
    """One that begins after the trials. The steps after it keep what it saves."""

    def make():
        return chain_that_changes_buffers(False, 5)

    with within(make):
        step, problems = make(), []
        for number in range(10):
            try:
                step(number)
            except RuntimeError as error:
                problems.append((number, str(error)))
        assert [number for number, _ in problems] == [5] and "scale of Scaled was changed" in problems[0][1]
        assert calls.refused()["Scaled"] == "scale is changed in place after the call"
    assert second_runs


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
    """From the fourth step on, when trials are over: they are kept from then on."""

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
        assert calls.refused()["SometimesLeftOut"] == DRAWS
    assert second_runs


def test_random_numbers_of_other_threads_are_drawn_once(within):
    """A block that does not draw is not recomputed then either, once that was seen: who drew can't be told."""
    drawn, is_over = [], threading.Event()

    def draw():
        while not is_over.is_set():
            drawn.append(random.random())
            time.sleep(1e-4)

    drawer = threading.Thread(target=draw)
    with within(chain_of_blocks):
        drawer.start()
        run(chain_of_blocks())
        drawn.clear()
        run(chain_of_blocks())
        is_over.set()
        drawer.join()
        assert calls.refused()["Block"] == DRAWS
    assert len(set(drawn)) == len(drawn)


def test_a_profile_shows_what_moves_and_what_is_computed_again(within):
    for rate, names in ((SLOW, {"ebbtide::recompute Block"}), (FAST, {"ebbtide::evict", "ebbtide::load"})):
        with within(lms_models.gpt, rate=rate):
            step = lms_models.gpt()
            run(step)
            with torch.profiler.profile() as profile:
                step(0)
        assert names <= {event.name for event in profile.events()}


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


def test_plans_leave_out_what_the_program_keeps(within, lms_extension):
    def make():
        torch.manual_seed(0)
        return chain([Kept() if number < 6 else Left() for number in range(48)])

    plain = run_plainly(make)
    # Those that are saved first leave first, but for the rule.
    with within(make, 0.7, recompute=False, evict=lambda module: not isinstance(module, Kept)):
        assert run(make()) == plain
        evicted = {(lms_extension.module_class(number), row[1] > 0) for number, *row in lms_extension.step_report()[2]}
        assert ("Left", True) in evicted and ("Kept", True) not in evicted


def test_without_evictions_plans_recompute(lms, within, second_runs):
    def make():
        return chain(blocks_of(count=10))

    with within(make, 0.7, FAST, evict=False):
        step = make()
        run(step)
        before = lms.stats()["evicted_bytes"]
        run(step, 2)
        assert second_runs and lms.stats()["evicted_bytes"] == before


def test_what_the_program_keeps_leaves_before_an_allocation_fails(lms, within):
    plain = run_plainly(lms_models.gpt)
    with within(lms_models.gpt, evict=False, recompute=False):
        assert run(lms_models.gpt()) == plain
        assert lms.stats()["evictions"] > 0


def test_layers_without_a_module_around_them_may_be_kept(lms):
    """What must not leave does so before an allocation fails, in each step, since no plan sends it: also where the
    steps are known from another rule."""

    def make():
        torch.manual_seed(0)
        layers = [nn.Linear(64, 64) for _ in range(48)]
        return chain(layers, lambda index, layer, hidden: torch.nn.functional.gelu(layer(hidden)).sin())

    plain, waits = run_plainly(make), []
    with lms.enable(limit="9MiB", min_size=SMALL, recompute=False):
        assert run(make()) == plain
    with lms.enable(limit="9MiB", min_size=SMALL, recompute=False, evict=False):
        step = make()
        assert run(step) == plain
        for number in range(4):
            before = control.reclaims()
            step(number)
            waits.append(control.reclaims() - before)
    assert min(waits) > 0, waits
