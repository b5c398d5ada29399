"""Large model support with a plan: what one step has shown is copied ahead of need in the next."""

import threading
import time

import pytest

torch = pytest.importorskip("torch")

from core_sim import Sim  # noqa: E402
from ebbtide import torch_extension  # noqa: E402
from ebbtide.lms import control  # noqa: E402
from lms_model import SMALL, make_model, peak_of_training, train, train_plainly  # noqa: E402

pytestmark = pytest.mark.sim_only  # tests/gpu/test_gpu_lms.py is for GPUs

SHAPE = {"depth": 12, "width": 64, "batch": 4096}
# Its steps take long enough that their times differ little on a busy machine.
LONGER_STEPS = {"depth": 12, "width": 128, "batch": 4096}
LATE, EAGER, RANDOM = 0, 1, 2


@pytest.fixture
def device_works():
    """Sets when the simulated device does its work."""
    yield lambda mode: Sim().set_async(mode, 5)
    Sim().set_async(LATE)


def reclaims():
    """How often memory was short, so that something had to leave at once."""
    return torch_extension.load("_lms").statistics()["reclaims"]


@pytest.mark.parametrize(("mode", "share"), [(LATE, 0.8), (EAGER, 0.6), (RANDOM, 0.45)])
def test_later_steps_need_no_reclaim(lms, device_works, mode, share):
    """Under the plan that they have. A step whose times differ by a quarter, as on a busy machine, is planned anew, and
    the new plan may meet free memory that lies in other pieces, which costs one reclaim.
    """
    device_works(mode)
    plain = train_plainly(steps=6, **LONGER_STEPS)
    limit = int(share * peak_of_training(**LONGER_STEPS))
    before_step, plans = [], []

    def note(step):
        before_step.append(reclaims())
        plans.append(torch_extension.load("_lms").statistics()["plans_made"])

    with lms.enable(limit=limit, min_size=SMALL):
        assert train(steps=6, **LONGER_STEPS, before_step=note) == plain
        numbers = lms.stats()
    assert numbers["evictions"] > 0
    # The plan for a step is made as it begins, after the call that notes it.
    assert before_step[5] - before_step[3] <= min(2, plans[5] - plans[2])
    assert numbers["prefetch_hits"] + numbers["prefetch_late"] > 0
    assert numbers["peak_device_bytes"] <= limit
    assert numbers["evicted_bytes"] == numbers["loaded_bytes"]


@pytest.mark.parametrize("share", [0.6, 0.8])
def test_what_was_short_between_two_saves_is_not_forgotten(lms, lms_extension, share):
    """What a step holds between two saves shows in no sample that is taken at them."""
    limit, before_step = int(share * peak_of_training(**SHAPE)), []
    with lms.enable(limit=limit, min_size=SMALL, recompute=False):
        lms_extension.assume_rate(1e10)  # or a busy machine measures others, and the step is planned anew
        train(steps=17, **SHAPE, before_step=lambda step: before_step.append(reclaims()))
    assert before_step[16] == before_step[5], before_step


def test_loads_that_the_device_has_done_are_hits(lms):
    limit = int(0.6 * peak_of_training(**SHAPE))
    Sim().set_async(EAGER)
    try:
        with lms.enable(limit=limit, min_size=SMALL):
            train(steps=4, **SHAPE)
            numbers = lms.stats()
    finally:
        Sim().set_async(LATE)
    assert numbers["prefetch_hits"] > 0
    assert numbers["prefetch_late"] == 0


def test_a_plan_ends_with_its_limit(lms):
    """Nothing leaves any more once everything fits."""
    limit = int(0.6 * peak_of_training(**SHAPE))
    evictions = []

    def before_step(step):
        if step == 3:
            lms.limit = "1GiB"
        evictions.append(lms.stats()["evictions"])

    with lms.enable(limit=limit, min_size=SMALL):
        train(steps=7, **SHAPE, before_step=before_step)
        evictions.append(lms.stats()["evictions"])
    assert evictions[3] > evictions[2] > 0
    assert evictions[7] == evictions[6] == evictions[5]


def run_steps(model, kinds):
    """Steps of several kinds, and what each gave."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    found = []
    for kind in kinds:
        optimizer.zero_grad()
        batch = torch.randn(1024 if kind == "small" else 4096, 64)
        if kind == "evaluation":
            found.append(model(batch).mean().item())
            continue
        layers = model[: len(model) // 2] if kind == "half" else model
        loss = layers(batch).pow(2).mean()
        if kind == "dropped":
            found.append(loss.item())
            continue
        loss.backward(retain_graph=kind == "twice")
        if kind == "twice":
            loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize(
    ("mode", "kinds"),
    [
        (LATE, ["whole", "half"] * 4),
        (RANDOM, ["whole", "small", "half"] * 3),
        (LATE, ["whole", "evaluation", "whole", "evaluation", "whole", "whole"]),
        (EAGER, ["whole", "whole", "dropped", "whole", "dropped", "dropped", "whole"]),
        (LATE, ["whole", "whole", "twice", "whole", "twice", "twice", "whole"]),
    ],
    ids=lambda value: "-".join(dict.fromkeys(value)) if isinstance(value, list) else ["late", "eager", "random"][value],
)
def test_steps_that_differ(lms, device_works, mode, kinds):
    device_works(mode)
    plain = run_steps(make_model(12, 64), kinds)
    limit = int(0.6 * peak_of_training(**SHAPE))
    with lms.enable(limit=limit, min_size=SMALL):
        assert run_steps(make_model(12, 64), kinds) == plain
        assert lms.stats()["peak_device_bytes"] <= limit


def test_an_exception_in_any_step(lms):
    """In forward and in backward, at every layer in turn: the steps after it give what they give without LMS."""

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(context, given, fails_in):
            context.fails_in = fails_in
            if fails_in == "forward":
                raise ArithmeticError
            return given.clone()

        @staticmethod
        def backward(context, gradient):
            if context.fails_in == "backward":
                raise ArithmeticError
            return gradient, None

    def run():
        model = make_model(6, 64)
        torch.manual_seed(2)
        losses = []
        for step in range(13):
            hidden = torch.randn(4096, 64)
            try:
                for index, layer in enumerate(model):
                    hidden = layer(hidden)
                    if step % 2 == 1 and index == step - 1:
                        hidden = Failing.apply(hidden, "forward" if step % 4 == 1 else "backward")
                loss = hidden.pow(2).mean()
                model.zero_grad()
                loss.backward()
                losses.append((loss.item(), model[0].weight.grad.sum().item()))
            except ArithmeticError:
                losses.append(None)
            del hidden
        return losses

    plain = run()
    assert None in plain
    limit = int(0.7 * peak_of_training(depth=6))
    with lms.enable(limit=limit, min_size=SMALL):
        assert run() == plain
        assert lms.stats()["evictions"] > 0
        assert lms.stats()["peak_device_bytes"] <= limit


def test_disable_ends_planned_actions_of_other_threads(lms):
    """Nothing leaves after it has returned."""
    plain = train_plainly(steps=8, **SHAPE)
    limit = int(0.5 * peak_of_training(**SHAPE))
    sim = Sim()
    for moment in (0, 2):
        results = []
        reached = threading.Event()

        def before_step(step, reached=reached):
            if step == 4:
                reached.set()

        def work(results=results, before_step=before_step):
            results.append(train(steps=8, **SHAPE, before_step=before_step))

        lms.enable(limit=limit, min_size=SMALL)
        thread = threading.Thread(target=work)
        thread.start()
        assert reached.wait(60)
        for copy in ("cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync"):
            sim.delay(copy, 0.003)
        threading.Event().wait(0.02 * moment)
        lms.disable()
        evictions = torch_extension.load("_lms").statistics()["evictions"]
        for copy in ("cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync"):
            sim.delay(copy, 0)
        thread.join()
        assert results == [plain]
        numbers = torch_extension.load("_lms").statistics()
        assert numbers["evictions"] == evictions
        assert numbers["host_bytes"] == 0


@pytest.mark.parametrize("late", ["weights.remove", "optimizer_states.remove"])
def test_no_allocation_fails_while_it_is_switched_off(lms, monkeypatch, late):
    plain = train_plainly(steps=8, **SHAPE)
    limit = int(0.5 * peak_of_training(**SHAPE))
    results, reached = [], threading.Event()
    step_of_disable = getattr(control, late.split(".")[0]), late.split(".")[1]
    original = getattr(*step_of_disable)

    def slow(*arguments):
        time.sleep(0.3)
        return original(*arguments)

    lms.enable(limit=limit, min_size=SMALL)
    monkeypatch.setattr(*step_of_disable, slow)
    thread = threading.Thread(
        target=lambda: results.append(
            train(steps=8, **SHAPE, before_step=lambda step: reached.set() if step == 2 else None)
        )
    )
    thread.start()
    assert reached.wait(60)
    lms.disable()
    thread.join()
    assert results == [plain]
