"""Large model support at random: evictions at every op, limits that change while it runs."""

import gc
import random

import pytest

torch = pytest.importorskip("torch")

from core_sim import UNKNOWN, Sim  # noqa: E402
from ebbtide import torch_extension  # noqa: E402
from lms_model import SMALL, make_model, train  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

pytestmark = pytest.mark.sim_only  # tests/gpu/test_gpu_lms.py is for GPUs


class EvictAtRandom(TorchDispatchMode):
    """Before every op something that can leave leaves."""

    def __init__(self, seed):
        super().__init__()
        self.random = random.Random(seed)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.random.random() < 0.5:
            torch_extension.load("_lms").evict(self.random.choice([1, 256 * 1024, 2**62]))
        return func(*args, **(kwargs or {}))


def make_mixed_step(seed):
    torch.manual_seed(seed)
    conv = torch.nn.Conv2d(3, 16, 3, padding=1)
    norm = torch.nn.BatchNorm2d(16)
    attention = torch.nn.MultiheadAttention(16, 2, batch_first=True)
    head = torch.nn.Linear(16, 5)
    modules = torch.nn.ModuleList([conv, norm, attention, head])
    optimizer = torch.optim.SGD(modules.parameters(), 1e-2, momentum=0.9)

    def step():
        optimizer.zero_grad()
        images = torch.randn(4, 3, 16, 16)
        features = torch.nn.functional.relu(norm(conv(images)), inplace=True)
        tokens = features.flatten(2).transpose(1, 2)
        mixed, _ = attention(tokens, tokens, tokens, need_weights=False)
        logits = head(torch.nn.functional.dropout(mixed, 0.1).mean(1))
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor([0, 1, 2, 3]))
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


@pytest.mark.timeout(400)
def test_random_evictions_at_every_op_for_80_steps(lms):
    step = make_mixed_step(3)
    plain = [step() for _ in range(80)]
    lms.enable(limit="1GiB", min_size="4KiB")
    step = make_mixed_step(3)
    with EvictAtRandom(7):
        assert [step() for _ in range(80)] == plain
    assert lms.stats()["evictions"] > 200


@pytest.mark.timeout(400)
def test_random_limits_while_it_runs_and_no_growth(lms, saver):
    chooser = random.Random(5)
    plain = train(60, depth=4, batch=2048)
    lms.enable(limit="12MiB", min_size=SMALL)  # so that no segment of an earlier test comes back whole and counts
    train(1, depth=4, batch=2048)
    needed = lms.stats()["peak_device_bytes"]
    held = []

    def change(step):
        lms.limit = chooser.choice(["auto", "1GiB", int(needed * chooser.uniform(0.7, 1.1))])
        gc.collect()
        held.append((lms.stats()["host_bytes"], lms.stats()["device_bytes"]))

    assert train(60, depth=4, batch=2048, before_step=change) == plain
    assert all(host == 0 for host, _ in held)
    assert max(device for _, device in held[30:]) <= max(device for _, device in held[:30]) + 20 * 2**20
    assert lms.stats()["evictions"] > 0


LATE, RANDOM = 0, 2


def run_random_steps(seed, steps, before_step=lambda step: None):
    """Steps that repeat a few shapes; some keep their graph for a second backward, some fail in backward."""
    chooser = random.Random(seed)
    model = make_model(8, 64)
    torch.manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    found = []
    for step in range(steps):
        before_step(step)
        batch, depth = chooser.choice([(4096, 16), (4096, 16), (2048, 16), (4096, 9)])
        kind = chooser.choice(["plain"] * 5 + ["twice", "dropped", "fails"])
        optimizer.zero_grad()
        hidden = torch.randn(batch, 64)
        fails_at = chooser.randrange(depth)
        for index, layer in enumerate(model[:depth]):
            hidden = layer(hidden)
            if kind == "fails" and index == fails_at:
                hidden.register_hook(fail)
        loss = hidden.pow(2).mean()
        del hidden
        found.append(loss.item())
        if kind == "dropped":
            continue
        try:
            loss.backward(retain_graph=kind == "twice")
            if kind == "twice":
                loss.backward()
        except ArithmeticError:
            continue
        optimizer.step()
    return found


def fail(gradient):
    raise ArithmeticError


@pytest.fixture
def sim():
    simulator = Sim()
    yield simulator
    simulator.clear_failures()
    simulator.set_async(LATE)


@pytest.mark.timeout(400)
def test_planned_steps_under_random_limits(lms, sim):
    plain = run_random_steps(3, 60)
    chooser = random.Random(4)
    with lms.enable(limit="1GiB", min_size=SMALL):
        run_random_steps(3, 12)
        needed = lms.stats()["peak_device_bytes"]
    negative = []

    def change(step):
        if step % 8 == 0:
            sim.set_async(chooser.randrange(3), step)
            lms.limit = int(needed * chooser.uniform(0.5, 1.1))
        numbers = lms.stats()
        negative.extend(name for name, value in numbers.items() if not 0 <= value < 2**50)

    with lms.enable(limit=int(0.8 * needed), min_size=SMALL):
        assert run_random_steps(3, 60, change) == plain
        gc.collect()
        numbers = lms.stats()
    assert negative == []
    assert numbers["evictions"] > 0
    assert numbers["prefetch_hits"] + numbers["prefetch_late"] > 0
    assert numbers["host_bytes"] == 0


COPY_CALLS = ("cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync", "cuEventRecord", "cuEventSynchronize", "cuStreamWaitEvent")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("function", COPY_CALLS)
def test_each_call_of_planned_copies_fails_once(lms, sim, function):
    """The step raises or recovers. Nothing is lost: the next steps give what they give without LMS."""
    model = make_model(4)
    batch = torch.randn(1024, 128, generator=torch.Generator().manual_seed(1))

    def step():
        model.zero_grad()
        loss = model(batch).pow(2).mean()
        loss.backward()
        return loss.item(), [parameter.grad.sum().item() for parameter in model.parameters()]

    plain = step()
    with lms.enable(limit="1GiB", min_size=SMALL):
        model.zero_grad()
        step()
        needed = lms.stats()["peak_device_bytes"]
    with lms.enable(limit=int(0.75 * needed), min_size=SMALL):
        for _ in range(3):
            assert step() == plain
        before = sim.calls(function)
        assert step() == plain
        calls = sim.calls(function) - before
        assert calls > 0
        for k in range(1, calls + 1):
            sim.fail(function, k, UNKNOWN)
            try:
                assert step() == plain
            except RuntimeError:
                model.zero_grad()
            sim.clear_failures()
            gc.collect()
            assert step() == plain
            assert lms.stats()["host_bytes"] == 0
            assert lms.stats()["device_bytes"] <= needed
        assert step() == plain
