"""Large model support: weights on the host pass through the device in a forward pass without gradients."""

import contextlib
import gc
import random
import signal
import threading

import pytest

torch = pytest.importorskip("torch")

from ebbtide import _core  # noqa: E402
from ebbtide.lms import weights  # noqa: E402
from ebbtide.lms.streaming import forward, forward_copies  # noqa: E402
from lms_model import MIB, SMALL, make_model  # noqa: E402
from lms_states import content, extension  # noqa: E402
from lms_weights import GRADIENTS, TAG, evaluate, on_host, send_all_away  # noqa: E402

pytestmark = pytest.mark.sim_only  # tests/gpu/test_gpu_lms.py is for GPUs

DEPTH, LIMIT = 24, 16 * MIB  # 24 MiB of weights


@pytest.fixture(autouse=True)
def _no_weights_left(saver, lms):
    yield
    gc.collect()
    lms.disable()
    for tag in (TAG, GRADIENTS):
        status = saver.tags().get(tag)
        assert status is None or status.lease_count == 0


@pytest.fixture
def away(lms):
    """Sends the weights of a model away, so that they stay there."""
    lms.enable(limit="1GiB", min_size=SMALL)
    weights._now.may_return = False

    def send(model):
        assert send_all_away() > 0
        assert on_host(*(each for each in model.parameters() if each.nbytes >= 65536))
        return model

    return send


def are_home(model):
    """Every parameter refers to its own memory, which is on the host."""
    assert not weights._now.forward._visiting
    large = [each for each in model.parameters() if each.nbytes >= 65536]
    return on_host(*large) == large


def test_a_model_larger_than_the_limit_settles(lms):
    """After the first passes nothing moves any more: what does not fit crosses the bus once in a pass."""
    plain = evaluate(make_model(DEPTH, 512), 6)
    with lms.enable(limit=LIMIT, min_size=SMALL):
        model = make_model(DEPTH, 512)
        addresses = [each.data_ptr() for each in model.parameters()]
        seen, results = [], []
        for number in range(6):
            results.append(evaluate(model, number + 1)[-1])
            seen.append(lms.stats())
        assert results == plain
        assert addresses == [each.data_ptr() for each in model.parameters()]
        assert all(numbers["peak_device_bytes"] <= LIMIT for numbers in seen)
        moved = [numbers["weight_evicted_bytes"] + numbers["weight_loaded_bytes"] for numbers in seen]
        assert moved[-1] == moved[2]
        away_bytes = sum(each.nbytes for each in on_host(*model.parameters()))
        assert seen[-1]["streamed_bytes"] - seen[-2]["streamed_bytes"] == 6 * away_bytes
        assert seen[-1]["slow_reads"] == 0


def test_a_higher_limit_brings_weights_back(lms):
    lms.enable(limit=LIMIT, min_size=SMALL)
    model = make_model(DEPTH, 512)
    want = evaluate(model)
    assert on_host(*model.parameters())
    lms.limit = "1GiB"
    assert evaluate(model) == want
    assert on_host(*model.parameters()) == []


def test_copies_are_begun_ahead_in_later_passes(away):
    model = away(make_model(8, 512))
    evaluate(model, 1)
    ahead = []
    for layer in model:
        layer.register_forward_pre_hook(lambda *_: ahead.append(len(weights._now.forward._ahead)))
    evaluate(model, 1)
    assert max(ahead) >= 4
    assert not weights._now.forward._ahead or len(weights._now.forward._ahead) < 8
    assert are_home(model)


# --- modules that write ---


class Writing(torch.nn.Module):
    def __init__(self, how):
        super().__init__()
        torch.manual_seed(1)
        self.weight = torch.nn.Parameter(torch.randn(512, 512))
        self.how = how

    def forward(self, given):
        if self.how == "in place":
            self.weight.mul_(1.01)
        elif self.how == "behind its version":
            self.weight.data.clamp_(-1, 1).mul_(1.01)
        elif self.how == "another memory":
            self.weight.data = self.weight.data * 1.01
        elif self.how == "raises":
            self.weight.mul_(1.01)
            raise ArithmeticError
        return given @ self.weight


class WritingLinear(torch.nn.Linear):
    def forward(self, given):
        self.weight.data.add_(0.01)
        return super().forward(given)


@pytest.mark.parametrize("how", ["in place", "behind its version", "another memory", "raises"])
def test_what_a_module_writes_stays(away, how):
    def run(model):
        given, results = torch.ones(4, 512), []
        with torch.no_grad():
            for _ in range(3):
                with contextlib.suppress(ArithmeticError):
                    results.append(model(given).sum().item())
        return results, content(model.parameters())

    plain = run(Writing(how))
    model = away(Writing(how))
    assert run(model) == plain
    assert not weights._now.forward._visiting


def _write_before(module, inputs):
    module.weight.data.add_(0.01)


@pytest.mark.parametrize("how", ["subclass", "pre-hook", "method"])
def test_torchs_own_modules_that_are_made_to_write(away, how):
    def make():
        torch.manual_seed(2)
        model = (WritingLinear if how == "subclass" else torch.nn.Linear)(512, 512)
        if how == "pre-hook":
            model.register_forward_pre_hook(_write_before)
        if how == "method":
            model.forward = WritingLinear.forward.__get__(model, WritingLinear)
        return model

    plain = make()
    if how == "method":
        plain.forward = lambda given: (plain.weight.data.add_(0.01), torch.nn.Linear.forward(plain, given))[1]
    want = evaluate(plain), content(plain.parameters())
    model = make()
    if how == "method":
        model.forward = lambda given: (model.weight.data.add_(0.01), torch.nn.Linear.forward(model, given))[1]
    away(model)
    assert (evaluate(model), content(model.parameters())) == want


def test_what_others_write_between_passes_is_seen(away):
    model, other = away(make_model(4, 512)), make_model(4, 512)
    evaluate(model)
    with torch.no_grad():
        for mine, its in zip(model.parameters(), other.parameters(), strict=True):
            its.mul_(0.5)
            mine.data.copy_(its)
    assert evaluate(model) == evaluate(other)


# --- who keeps what, and who calls whom ---


class Table(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.weight = torch.nn.Parameter(torch.randn(1024, 256))

    def forward(self, count):
        return self.weight[:count]


def test_a_view_that_leaves_its_module(away):
    model = away(torch.nn.ModuleList([Table(), *make_model(6, 512)]))
    want = model[0].weight[:100].clone()
    with torch.no_grad():
        view = model[0](100)
        for _ in range(3):
            given = torch.ones(2, 512)
            for layer in model[1:]:
                given = layer(given)
        assert torch.equal(view, want)
    assert model[0](10).data_ptr() == model[0].weight.data_ptr(), "with gradients it is the weight itself"


class Nested(torch.nn.Module):
    def __init__(self, depth, shared):
        super().__init__()
        self.shared = shared
        self.own = torch.nn.Parameter(torch.full((256, 256), 0.01))
        self.inner = Nested(depth - 1, shared) if depth else None

    def forward(self, given, again=True):
        given = torch.nn.functional.gelu(given @ self.own) + given @ self.shared
        given = given if self.inner is None else self.inner(given)
        return self(given, again=False) if again else given @ self.own


def test_shared_nested_and_recursive(away):
    def make():
        torch.manual_seed(5)
        return Nested(2, torch.nn.Parameter(torch.randn(256, 256) * 0.01))

    given = torch.ones(3, 256)
    with torch.no_grad():
        plain = make()(given)
        model = away(make())
        for _ in range(3):
            assert torch.equal(model(given), plain)
    assert are_home(model)


def test_errors_and_what_comes_after_them(away):
    class Failing(torch.nn.Module):
        def forward(self, given):
            raise ArithmeticError

    model = make_model(6, 512)
    want = evaluate(model)
    model = away(make_model(6, 512))
    failing = torch.nn.Sequential(*model[:5], Failing(), *model[5:])
    for _ in range(2):
        with torch.no_grad(), pytest.raises(ArithmeticError):
            failing(torch.ones(2, 512))
        assert are_home(model)
        assert evaluate(model) == want


@pytest.mark.parametrize("context", [torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_other_modes(away, context):
    given = torch.ones(2, 512)
    with torch.no_grad(), context():
        plain = make_model(6, 512)(given).float().sum().item()
    model = away(make_model(6, 512))
    for _ in range(2):
        with torch.no_grad(), context():
            assert model(given).float().sum().item() == plain
    assert are_home(model)
    model(given).sum().backward()


def test_with_gradients_nothing_passes_through(away, lms):
    model = away(make_model(4, 512))
    model(torch.ones(2, 512)).sum().backward()
    assert lms.stats()["streamed_bytes"] == 0


def test_checkpoints_run_both_ways(away):
    from torch.utils.checkpoint import checkpoint

    def train(model):
        losses = []
        for _ in range(3):
            loss = checkpoint(model, torch.ones(8, 512, requires_grad=True), use_reentrant=True).pow(2).mean()
            loss.backward()
            losses.append((loss.item(), model[0].weight.grad.sum().item()))
            extension().make_room_of_weights(0, 2**62)
        return losses

    plain = train(make_model(4, 512))
    assert train(away(make_model(4, 512))) == plain


def test_switched_off_inside_a_pass(away, lms):
    class Ending(torch.nn.Module):
        def forward(self, given):
            lms.disable()
            return given

    model = make_model(6, 512)
    want = evaluate(model, 1)
    model = away(make_model(6, 512))
    ending = torch.nn.Sequential(*model[:3], Ending(), *model[3:])
    assert evaluate(ending, 1) == want
    assert evaluate(model, 1) == want


class Full(forward_copies.Lane):
    def copy_in(self, home):
        raise torch.OutOfMemoryError("planted")


def test_without_room_for_copies_weights_come_as_they_did(away, lms, monkeypatch):
    plain = evaluate(make_model(4, 512))
    model = away(make_model(4, 512))
    monkeypatch.setattr(forward, "make_lane", Full)
    assert evaluate(model) == plain
    assert lms.stats()["streamed_bytes"] == 0
    assert lms.stats()["weight_loaded_bytes"] > 0


def test_threads_that_evaluate_one_model(away):
    want = evaluate(make_model(6, 512), 10)
    model = away(make_model(6, 512))
    found = {}
    threads = [
        threading.Thread(target=lambda number=number: found.update({number: evaluate(model, 10)}))
        for number in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(range(3), want)
    assert are_home(model)


def test_interrupts_leave_every_weight_whole(away, lms):
    class InterruptError(Exception):
        pass

    def interrupt(*_):
        raise InterruptError

    want = evaluate(make_model(6, 512), 1), content(make_model(6, 512).parameters())
    model = away(make_model(6, 512))
    chooser, count = random.Random(6), 0
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(100):
            try:
                signal.setitimer(signal.ITIMER_REAL, chooser.uniform(1e-4, 5e-3))
                evaluate(model, 40)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except InterruptError:
                count += 1
            torch.set_grad_enabled(True)
            assert evaluate(model, 1) == want[0]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert count > 0
    lms.disable()
    assert content(model.parameters()) == want[1]
    assert {_core.find(each.data_ptr()).tag for each in model.parameters() if each.nbytes >= MIB} == {TAG}
