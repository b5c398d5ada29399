"""Large model support: weights and gradients leave and come back in training, whatever else happens there."""

import contextlib
import random
import threading

import pytest

torch = pytest.importorskip("torch")

from core_sim import UNKNOWN, Sim  # noqa: E402
from lms_model import MIB, SMALL, evict_all, make_model  # noqa: E402
from lms_states import Training, content, extension, run  # noqa: E402
from lms_weights import GRADIENTS, STEPS, TAG, evaluate, send_all_away, tag_of  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

pytestmark = [  # tests/gpu/test_gpu_lms.py is for GPUs
    pytest.mark.sim_only,
    pytest.mark.usefixtures("no_weights_left"),
]


@pytest.mark.parametrize("limit", [13 * MIB, 8 * MIB])
def test_training_in_a_part_of_what_it_needs(lms, limit):
    """It needs 40 MiB: 8 each of weights, gradients, both states and activations."""
    plain = run(STEPS)
    with lms.enable(limit=limit, min_size=SMALL):
        training = Training()
        losses = [training.step(batch) for batch in STEPS]
        assert (losses, training.result()) == plain
        numbers = lms.stats()
        assert {tag_of(layer.weight.grad) for layer in training.model[::2]} & {GRADIENTS}
    assert numbers["peak_device_bytes"] <= limit
    assert numbers["weight_evicted_bytes"] > 0


def test_weights_that_were_replaced_give_their_memory_back(lms, saver):
    """FSDP2 keeps a shard of each weight, and that has no storage of its own."""
    with lms.enable(limit="1GiB", min_size=SMALL):
        model = make_model(8, 512)
        shards = [layer.weight.detach()[:256].clone() for layer in model[::2]]
        assert saver.tags()[TAG].resident_bytes >= 8 * MIB
        for layer, shard in zip(model[::2], shards, strict=True):
            del layer.weight
            layer.weight = shard
        model[1](torch.ones(4, 512))
        assert saver.tags()[TAG].resident_bytes < 2 * MIB, "the biases"


def test_gradients_that_are_accumulated_on_the_host(lms):
    def train():
        training = Training(depth=4)
        for _ in range(3):
            training.forward().backward()
            if lms.enabled:
                send_all_away()
        training.optimizer.step()
        return training.result(), content(each.grad for each in training.model.parameters())

    plain = train()
    lms.enable(limit="1GiB", min_size=SMALL)
    keeper = make_model(1, 512)
    assert send_all_away() > 0, "memory is short from now on"
    assert train() == plain
    assert keeper is not None


def test_gradients_with_another_holder_stay(lms):
    lms.enable(limit="1GiB", min_size=SMALL)
    model = make_model(2, 512)
    send_all_away()
    seen = []
    model[0].weight.register_hook(lambda gradient: seen.append(gradient))
    model(torch.ones(4, 512)).sum().backward()
    assert tag_of(model[2].weight.grad) == GRADIENTS
    if seen[0].data_ptr() == model[0].weight.grad.data_ptr():
        assert tag_of(model[0].weight.grad) == "lms"
    assert torch.equal(seen[0], model[0].weight.grad)


def test_modules_called_several_times_and_exceptions_in_forward(lms):
    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = make_model(4, 512)
            self.own = torch.nn.Parameter(torch.eye(512))
            self.fails = False

        def forward(self, given):
            hidden = self.inner(self.inner(given))
            if self.fails:
                raise ValueError("planted")
            return hidden @ self.own

    def train():
        torch.manual_seed(0)
        model, losses = Twice(), []
        for turn in range(4):
            model.fails = turn == 1
            with contextlib.suppress(ValueError):
                loss = model(torch.ones(64, 512)).pow(2).mean()
                loss.backward()
                losses.append(loss.item())
        return losses, content(each.grad for each in model.parameters())

    plain = train()
    with lms.enable(limit=9 * MIB, min_size=SMALL):
        assert train() == plain
        assert lms.stats()["weight_evicted_bytes"] > 0
        # No use is left open: memory for another thread can leave.
        found = []
        model = make_model(1, 512)
        mover = threading.Thread(target=lambda: found.append(send_all_away()))
        mover.start()
        mover.join()
        assert found[0] > 0 and model is not None


def test_while_another_thread_uses_weights_none_moves(lms):
    lms.enable(limit="1GiB", min_size=SMALL)
    model = make_model(1, 512)
    may_go, is_inside = threading.Event(), threading.Event()

    def wait(*_):
        is_inside.set()
        assert may_go.wait(30)

    model[0].register_forward_pre_hook(wait)
    user = threading.Thread(target=evaluate, args=(model, 1))
    user.start()
    assert is_inside.wait(30)
    assert send_all_away() == 0
    may_go.set()
    user.join()
    assert send_all_away() > 0


def test_threads_that_evaluate_and_train(lms):
    def train(seed, training, found):
        found[seed] = [training.step(64) for _ in range(4)], evaluate(training.model)

    def train_all():
        found = {}
        threads = [threading.Thread(target=train, args=(seed, Training(depth=4), found)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found[0]

    plain = train_all()
    with lms.enable(limit="128MiB", min_size=SMALL):
        for _ in range(3):
            assert train_all() == plain


@pytest.mark.parametrize("when", ["before backward", "after backward"])
def test_disable_amid_a_step(lms, saver, when):
    def train(disables):
        training = Training(depth=4)
        losses = []
        for turn in range(3):
            training.optimizer.zero_grad()
            loss = training.forward()
            if disables and turn == 1 and when == "before backward":
                lms.disable()
            loss.backward()
            if disables and turn == 1 and when == "after backward":
                lms.disable()
            training.optimizer.step()
            losses.append(loss.item())
        return losses, training.result()

    plain = train(False)
    lms.enable(limit=7 * MIB, min_size=SMALL)
    assert train(True) == plain
    assert not extension().make_room_of_weights(0, 2**62), "nothing moves by itself"


@pytest.mark.parametrize("function", ["cuMemCreate", "cuMemMap", "cuMemUnmap", "cuMemcpyDtoDAsync"])
def test_driver_calls_that_fail_in_a_move(lms, function):
    sim = Sim()
    plain = evaluate(make_model(2, 512), 8)
    lms.enable(limit="1GiB", min_size=SMALL)
    model, found = make_model(2, 512), []
    want = content(model.parameters())
    generator = torch.Generator().manual_seed(1)
    try:
        for k in range(1, 9):
            sim.fail(function, k, UNKNOWN)
            send_all_away()
            sim.clear_failures()
            sim.fail(function, k, UNKNOWN)
            with torch.no_grad():
                found.append(model(torch.randn(32, 512, generator=generator)).sum().item())
            sim.clear_failures()
            assert content(model.parameters()) == want
    finally:
        sim.clear_failures()
    assert found == plain


class MoveAtRandom(TorchDispatchMode):
    """Before every op, something that can leave leaves."""

    def __init__(self, seed):
        super().__init__()
        self.random = random.Random(seed)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        move = self.random.choice([evict_all, send_all_away, lambda: extension().send_states_away(2**62), None, None])
        if move is not None:
            move()
        return func(*args, **(kwargs or {}))


def test_random_moves_at_every_op(lms):
    plain = run([64] * 10, depth=3, width=256)
    lms.enable(limit="1GiB", min_size=SMALL)
    with MoveAtRandom(9):
        assert run([64] * 10, depth=3, width=256) == plain
    numbers = lms.stats()
    assert min(numbers["evicted_bytes"], numbers["weight_loaded_bytes"], numbers["state_evicted_bytes"]) > 0


def test_weights_that_have_not_changed_leave_without_a_copy(lms, saver):
    lms.enable(limit="1GiB", min_size=SMALL)
    model = make_model(4, 512)
    plain = evaluate(model)
    before = [saver.stats()["bytes_demoted"], Sim().calls("cuMemcpyDtoDAsync")]
    send_all_away()
    assert evaluate(model) == plain
    copies = Sim().calls("cuMemcpyDtoDAsync")
    assert copies > before[1]
    send_all_away()
    assert Sim().calls("cuMemcpyDtoDAsync") == copies
    assert saver.stats()["bytes_demoted"] - before[0] >= 8 * MIB
    assert evaluate(model) == plain
    with torch.no_grad():
        model[0].weight.add_(1)
    changed = evaluate(model)
    send_all_away()
    assert evaluate(model) == changed != plain
    held = saver.stats()["host_held_bytes"]
    lms.disable()
    assert saver.stats()["host_held_bytes"] <= held - 4 * MIB, "the host memory of what came back"


def test_random_limits_and_evictions_of_weights_and_states_while_it_trains(lms):
    chooser = random.Random(3)
    batches = [chooser.choice([64, 256, 1024]) for _ in range(20)]
    plain = run(batches, depth=6)
    with lms.enable(limit="1GiB", min_size=SMALL):
        training, losses = Training(depth=6), []
        for batch in batches:
            lms.limit = chooser.choice(["auto", "1GiB", chooser.randrange(12, 30) * MIB])
            if chooser.random() < 0.3:
                extension().make_room_of_weights(0, chooser.randrange(1, 8) * MIB)
            losses.append(training.step(batch))
            assert lms.limit == "auto" or lms.stats()["device_bytes"] <= lms.limit
        assert (losses, training.result()) == plain
        numbers = lms.stats()
        assert min(numbers[f"{kind}_bytes"] for kind in ("weight_evicted", "state_evicted", "state_loaded")) > 0
