"""Large model support: optimizer states leave the device where memory stays short without them."""

import contextlib
import gc

import pytest

torch = pytest.importorskip("torch")

from ebbtide import _core  # noqa: E402
from ebbtide.lms import optimizer_states  # noqa: E402
from lms_model import MIB, SMALL, make_model  # noqa: E402
from lms_states import (  # noqa: E402
    FOR_GROWING,
    FOR_STEADY,
    GROWING,
    STEADY,
    TAG,
    Training,
    content,
    extension,
    run,
    run_plainly,
)

pytestmark = [  # tests/gpu/test_gpu_lms.py is for GPUs
    pytest.mark.sim_only,
    pytest.mark.usefixtures("no_states_left"),
]


@contextlib.contextmanager
def pinned():
    """States and weights stay on the device."""
    extension().allow_state_moves(False)
    extension().allow_weight_moves(False)
    yield
    extension().allow_state_moves(True)
    extension().allow_weight_moves(True)


def test_with_room_nothing_leaves(lms, saver):
    plain = run_plainly(STEADY)
    with lms.enable(limit="1GiB", min_size=SMALL):
        training = Training()
        losses = [training.step() for _ in STEADY]
        assert (losses, training.result()) == plain
        big = [each for each in training.states() if each.nbytes >= MIB]
        assert len(big) == 16
        assert {_core.find(each.data_ptr()).tag for each in training.states()} == {TAG}
        assert {_core.find(layer.weight.data_ptr()).tag for layer in training.model[::2]} == {"lms.weights"}
        assert lms.stats()["state_host_bytes"] == lms.stats()["slow_reads"] == 0
        assert saver.tags()[TAG].lease_count == 0


class Another(torch.optim.AdamW):
    """A class that ebbtide does not know, so its steps do not run in pieces."""


@pytest.mark.parametrize("make", [torch.optim.AdamW, Another])
def test_states_that_do_not_fit_are_made_on_the_host_and_read_there_or_in_pieces(lms, make):
    plain = run_plainly(STEADY, make=make)
    with lms.enable(limit=FOR_STEADY, min_size=SMALL):
        assert run(STEADY, make=make) == plain
        numbers = lms.stats()
    assert numbers["peak_device_bytes"] <= FOR_STEADY
    assert (numbers["streamed_bytes"] > 0, numbers["slow_reads"] > 0) == (make is not Another, make is Another)
    assert "states on the host" in lms.report()


def test_states_leave_on_demand_then_ahead_and_come_back(lms):
    plain = run_plainly(GROWING, make=Another)
    with lms.enable(limit=FOR_GROWING, min_size=SMALL):
        training, losses, left = Training(make=Another), [], []
        for batch in GROWING:
            losses.append(training.step(batch))
            left.append(lms.stats())
        assert (losses, training.result()) == plain
    assert left[1]["state_evicted_bytes"] == left[1]["slow_reads"] == 0
    assert left[2]["state_evicted_bytes"] > 0, "on demand"
    assert left[3]["state_loaded_bytes"] > 0
    assert all(numbers["peak_device_bytes"] <= FOR_GROWING for numbers in left)
    assert all(numbers["state_host_bytes"] > 0 for numbers in left[2:]), "ahead"


def test_with_states_and_weights_pinned_to_the_device_memory_runs_out(lms):
    with lms.enable(limit=FOR_GROWING, min_size=SMALL, overflow=False):
        training = Training()
        with pinned():
            training.step()
            with pytest.raises(torch.OutOfMemoryError):
                training.step(2048)
        gc.collect()
        training.step(2048)
        assert lms.stats()["state_evicted_bytes"] > 0


def test_states_can_be_read_and_written_on_the_host(lms):
    training = Training()
    training.step()
    plain = [each.sum() for each in training.states()]
    lms.enable(limit="1GiB", min_size=SMALL)
    training = Training()
    training.step()
    assert extension().send_states_away(2**62) >= 16 * MIB
    assert all(map(torch.equal, plain, [each.sum() for each in training.states()]))
    addresses = [each.data_ptr() for each in training.states()]
    want = [each.add_(1).clone() for each in training.states()]
    assert 0 < extension().bring_states_back(6 * MIB) <= 6 * MIB
    assert extension().bring_states_back(2**62) > 0
    assert lms.stats()["state_host_bytes"] == 0
    assert addresses == [each.data_ptr() for each in training.states()]
    assert all(map(torch.equal, want, training.states()))


def test_a_new_limit_sends_states_away_and_forgets_the_shortage(lms):
    lms.enable(limit="1GiB", min_size=SMALL)
    training = Training()
    training.step()
    held = lms.stats()["device_bytes"]
    lms.limit = held - 6 * MIB
    assert lms.stats()["state_host_bytes"] > 0
    assert lms.stats()["device_bytes"] <= held - 6 * MIB
    lms.limit = "1GiB"
    training.step()
    assert lms.stats()["state_host_bytes"] == 0
    training.step()
    assert lms.stats()["state_host_bytes"] == 0


# --- optimizers ---


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (torch.optim.AdamW, {"foreach": True, "amsgrad": True}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.SGD, {}),
        (torch.optim.Adagrad, {}),
    ],
)
def test_optimizers_of_torch(lms, make, options):
    plain = run_plainly(GROWING, make=make, **options)
    with lms.enable(limit=FOR_GROWING, min_size=SMALL):
        assert run(GROWING, make=make, **options) == plain
        assert lms.stats()["peak_device_bytes"] <= FOR_GROWING
        has_states = make is not torch.optim.SGD or options != {}
        assert (lms.stats()["state_evicted_bytes"] > 0) is has_states


def run_closures(make, **options):
    training = Training(make=make, depth=2, **options)
    losses = []

    def closure():
        training.optimizer.zero_grad()
        loss = training.forward()
        tag = _core.find(loss.data_ptr())
        assert tag is None or tag.tag == "lms", "activations are no states"
        loss.backward()
        return loss

    for turn in range(3):
        given = {"closure": closure} if turn == 1 else {}
        losses.append(training.optimizer.step(*([] if given else [closure]), **given).item())
    return losses, training.result()


@pytest.mark.parametrize("make", [torch.optim.LBFGS, torch.optim.AdamW])
def test_closures(lms, make):
    options = {"lr": 1e-2, "max_iter": 4, "history_size": 3} if make is torch.optim.LBFGS else {}
    plain = run_closures(make, **options)
    with lms.enable(limit="1GiB", min_size=SMALL):
        assert run_closures(make, **options) == plain
        needed = lms.stats()["peak_device_bytes"]
    gc.collect()
    with lms.enable(limit=int(0.9 * needed), min_size=SMALL):
        assert run_closures(make, **options) == plain


def test_two_optimizers_and_groups_that_come_later(lms):
    def train():
        model = make_model(8, 512)
        first = torch.optim.AdamW(model[:8].parameters(), 1e-3)
        second = torch.optim.SGD(model[8:12].parameters(), 1e-3, momentum=0.9)
        generator, losses = torch.Generator().manual_seed(3), []
        for turn in range(5):
            if turn == 2:
                second.add_param_group({"params": model[12:].parameters(), "lr": 1e-4})
            model.zero_grad()
            hidden = model(torch.randn(256, 512, generator=generator))
            (hidden.repeat(8, 1).sin() if turn > 2 else hidden).pow(2).mean().backward()
            first.step()
            second.step()
            losses.append(hidden.sum().item())
        return losses, content(model.parameters())

    plain = train()
    with lms.enable(limit=FOR_GROWING, min_size=SMALL):
        assert train() == plain
        numbers = lms.stats()
    assert numbers["peak_device_bytes"] <= FOR_GROWING
    assert numbers["state_evicted_bytes"] > 0


def test_an_optimizer_class_that_is_defined_later(lms):
    lms.enable(limit="1GiB", min_size=SMALL)

    class Mine(torch.optim.Optimizer):
        def __init__(self, parameters, lr):
            super().__init__(parameters, {"lr": lr})

        @torch.no_grad()
        def step(self, closure=None):
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["sum"] = parameter.grad.clone()

    class Derived(Mine):
        def step(self, closure=None):
            assert extension().is_in_step()
            return super().step(closure)

    class Unused(Mine):
        def step(self, closure=None):
            return None

    assert hasattr(Unused.step, "__wrapped__")
    for make in (Mine, Derived):
        training = Training(make=make, depth=1)
        training.step()
        assert {_core.find(each.data_ptr()).tag for each in training.states()} == {TAG}
    lms.disable()
    assert not hasattr(Unused.step, "__wrapped__")
    training = Training(make=Mine, depth=1)
    training.step()
    assert {_core.find(each.data_ptr()) for each in training.states()} == {None}


def test_checkpoints_while_states_are_on_the_host(lms, tmp_path):
    def train(moves):
        training = Training(depth=4)
        training.step()
        if moves:
            assert extension().send_states_away(2**62) > 0
        torch.save(training.optimizer.state_dict(), tmp_path / "saved.pt")
        losses = [training.step()]
        training.optimizer.load_state_dict(torch.load(tmp_path / "saved.pt"))
        losses.append(training.step())
        loaded = training.optimizer.state_dict()
        loaded["state"] = {
            number: {name: tensor.clone() for name, tensor in state.items()}
            for number, state in loaded["state"].items()
        }
        training.optimizer.load_state_dict(loaded)
        losses.append(training.step())
        if moves:
            assert {_core.find(each.data_ptr()).tag for each in training.states()} == {TAG}
            assert extension().send_states_away(2**62) >= 8 * MIB
        return losses, training.result()

    plain = train(False)
    lms.enable(limit="1GiB", min_size=SMALL)
    assert train(True) == plain


def test_a_region_of_the_program_keeps_its_states(lms, saver, tag):
    lms.enable(limit="1GiB", min_size=SMALL)
    training = Training(depth=1)
    training.forward().backward()
    with saver.region(tag):
        training.optimizer.step()
    assert {_core.find(each.data_ptr()).tag for each in training.states()} == {tag}


class LateStates(torch.optim.SGD):
    """Makes a state at its third step."""

    steps = 0

    def step(self, closure=None):
        self.steps += 1
        if self.steps == 3:
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["late"] = torch.ones_like(parameter)
        return super().step(closure)


@pytest.mark.parametrize(
    ("make", "options", "times"),
    [(torch.optim.SGD, {}, 0), (torch.optim.SGD, {"momentum": 0.9}, 1), (LateStates, {}, 1)],
)
def test_a_region_is_opened_only_where_states_may_be_made(lms, monkeypatch, make, options, times):
    """On a GPU torch's cache is emptied around it."""
    opened, region = [], optimizer_states.region

    def counted(*arguments, **given):
        opened.append(arguments)
        return region(*arguments, **given)

    monkeypatch.setattr(optimizer_states, "region", counted)
    with lms.enable(limit="1GiB", min_size=SMALL):
        training = Training(make=make, depth=2, **options)
        losses = [training.step() for _ in range(5)]
        assert opened == [(TAG,)] * times
        assert {_core.find(each.data_ptr()).tag for each in training.states()} <= {TAG}
        assert len(training.states()) == (0 if make is torch.optim.SGD and not options else 4)
    monkeypatch.undo()
    plain = Training(make=make, depth=2, **options)
    assert losses == [plain.step() for _ in range(5)]


def test_states_on_the_host_leave_their_room_to_activations(lms, monkeypatch):
    """A step that stays the same is planned anew, after more steps on a busy machine, and less of it leaves: 12 MiB of
    states are more than a quarter of the limit, which is what a plan may leave free for pieces."""
    monkeypatch.setattr(optimizer_states, "_bring_states_back", lambda *_: None)
    options = {"amsgrad": True, "depth": 16, "width": 256, "rows": 1024}
    with lms.enable(limit="40MiB", min_size=SMALL):
        training, losses, left = Training(**options), [], []
        while len(losses) < 5 or (left[-1] >= left[3] and len(losses) < 40):
            before = lms.stats()["evicted_bytes"]
            losses.append(training.step(1024))
            left.append(lms.stats()["evicted_bytes"] - before)
            if len(losses) == 4:
                extension().send_states_away(2**62)
        found = losses, training.result()
    assert left[-1] < left[3]
    assert found == run([1024] * len(losses), **options)
