"""Large model support at random: evictions at every op, limits that change while it runs."""

import gc
import random

import pytest

torch = pytest.importorskip("torch")

from ebbtide import torch_extension  # noqa: E402
from lms_model import SMALL, train  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

pytestmark = pytest.mark.sim_only  # LMS runs on the simulated device so far


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
def test_random_evictions_at_every_op_for_200_steps(lms):
    step = make_mixed_step(3)
    plain = [step() for _ in range(200)]
    lms.enable(limit="1GiB", min_size="4KiB")
    step = make_mixed_step(3)
    with EvictAtRandom(7):
        assert [step() for _ in range(200)] == plain
    assert lms.stats()["evictions"] > 200


@pytest.mark.timeout(400)
def test_random_limits_while_it_runs_and_no_growth(lms, saver):
    chooser = random.Random(5)
    plain = train(60, depth=4, batch=1024)
    lms.enable(limit="1GiB", min_size=SMALL)
    train(1, depth=4, batch=1024)
    needed = lms.stats()["peak_device_bytes"]
    held = []

    def change(step):
        lms.limit = chooser.choice([None, "1GiB", int(needed * chooser.uniform(0.7, 1.1))])
        gc.collect()
        held.append((lms.stats()["host_bytes"], lms.stats()["device_bytes"]))

    assert train(60, depth=4, batch=1024, before_step=change) == plain
    assert all(host == 0 for host, _ in held)
    assert max(device for _, device in held[30:]) <= max(device for _, device in held[:30]) + 20 * 2**20
    assert lms.stats()["evictions"] > 0
