"""Large model support: torch's layers use copies of weights on the host in a forward pass without gradients."""

import contextlib
import copy
import pickle
import random
import threading

import pytest

torch = pytest.importorskip("torch")

from ebbtide import _core  # noqa: E402
from ebbtide.lms import weights  # noqa: E402
from ebbtide.lms.streaming import layers  # noqa: E402
from lms_model import SMALL, make_model  # noqa: E402
from lms_states import Interrupts, content, extension  # noqa: E402
from lms_weights import TAG, evaluate, on_host, send_all_away  # noqa: E402

MIB = 2**20
pytestmark = [  # tests/gpu/test_gpu_lms_states.py is for GPUs
    pytest.mark.sim_only,
    pytest.mark.usefixtures("no_weights_left"),
]

DEPTH, LIMIT = 24, 16 * MIB  # 24 MiB of weights


@pytest.fixture
def away(lms):
    """Sends the weights of a model away, so that they stay there."""
    lms.enable(limit="1GiB", min_size=SMALL)
    weights._now.may_return = False

    def send(model):
        assert send_all_away() > 0
        assert are_away(model)
        return model

    return send


def are_away(model):
    large = [each for each in model.parameters() if each.nbytes >= MIB]
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
        assert seen[-1]["streamed_bytes"] - seen[-2]["streamed_bytes"] == 6 * away_bytes > 0
        assert seen[-1]["slow_reads"] == 0


def test_a_higher_limit_brings_weights_back(lms):
    lms.enable(limit=LIMIT, min_size=SMALL)
    model = make_model(DEPTH, 512)
    want = evaluate(model)
    assert on_host(*model.parameters())
    lms.limit = "1GiB"
    assert evaluate(model) == want
    assert on_host(*model.parameters()) == []


@pytest.mark.parametrize(
    ("make", "given"),
    [
        (lambda: torch.nn.Linear(512, 1024), (3, 512)),
        (lambda: torch.nn.Linear(512, 1024, bias=False, dtype=torch.bfloat16), (3, 512)),
        (lambda: torch.nn.Conv1d(512, 512, 3, padding=1, padding_mode="circular"), (2, 512, 8)),
        (
            lambda: torch.nn.Conv2d(256, 512, 3, stride=2, groups=2).to(memory_format=torch.channels_last),
            (2, 256, 8, 8),
        ),
        (lambda: torch.nn.Conv3d(128, 128, (3, 3, 3), dilation=2), (1, 128, 6, 6, 6)),
    ],
    ids=["Linear", "bfloat16", "Conv1d", "Conv2d", "Conv3d"],
)
def test_each_layer(away, lms, make, given):
    torch.manual_seed(1)
    layer = make()
    given = torch.randn(given, dtype=layer.weight.dtype)
    with torch.no_grad():
        plain = layer(given)
        torch.manual_seed(1)
        layer = away(make())
        strides = layer.weight.stride()
        for call in (layer, lambda each: layer(input=each), layer.forward):
            assert torch.equal(call(given), plain)
    assert lms.stats()["streamed_bytes"] >= 2 * layer.weight.nbytes
    assert layer.weight.stride() == strides
    assert are_away(layer)


# --- writes and references of others ---


class Writing(torch.nn.Linear):
    def forward(self, given):
        self.weight.data.clamp_(-1, 1).mul_(1.01)
        return super().forward(given)


class Transposing(torch.nn.Linear):
    def forward(self, given):
        self.weight.data = self.weight.data.t()
        return super().forward(given)


class Outer(torch.nn.Module):
    """It writes the weight of a layer that it calls later, behind its version."""

    def __init__(self, inner):
        super().__init__()
        self.first, self.second = torch.nn.Linear(512, 512), inner

    def forward(self, given):
        given = self.first(given)
        self.second.weight.data.mul_(0.5)
        return self.second(given) + given @ self.second.weight


@pytest.mark.parametrize(
    "make",
    [
        lambda: Writing(512, 512),
        lambda: Transposing(512, 512),
        lambda: Outer(torch.nn.Linear(512, 512)),
        lambda: Outer(Writing(512, 512)),
    ],
    ids=["itself", "its layout", "from outside", "both"],
)
def test_writes_in_a_pass_stay(away, make):
    def run(model):
        results = evaluate(model, 4)
        return results, content(each.contiguous() for each in model.parameters())

    torch.manual_seed(2)
    plain = run(make())
    torch.manual_seed(2)
    assert run(away(make())) == plain


def _write_before(module, inputs):
    module.weight.data.add_(0.01)


def test_hooks_that_write(away):
    def make():
        torch.manual_seed(2)
        model = torch.nn.Linear(512, 512)
        model.register_forward_pre_hook(_write_before)
        return model

    plain = make()
    want = evaluate(plain), content(plain.parameters())
    model = away(make())
    assert (evaluate(model), content(model.parameters())) == want


def test_a_replaced_forward_is_called(away, lms, monkeypatch):
    model = away(make_model(2, 512))
    calls, ours = [], torch.nn.Linear.forward

    def theirs(self, given):
        calls.append(self)
        return ours(self, given)

    monkeypatch.setattr(torch.nn.Linear, "forward", theirs)
    evaluate(model, 1)
    assert calls == [model[0], model[2]]
    lms.disable()
    assert torch.nn.Linear.forward is theirs
    evaluate(model, 1)
    monkeypatch.undo()
    torch.nn.Linear.forward = ours.__wrapped__


def test_tied_weights_and_views_are_the_weight_itself(away):
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(3)
            self.table = torch.nn.Embedding(1024, 512)
            self.head = torch.nn.Linear(512, 1024, bias=False)
            self.head.weight = self.table.weight
            self.kept = None

        def forward(self, numbers):
            self.kept = self.head.weight[:3]
            return self.head(self.table(numbers)) @ self.table.weight

    numbers = torch.arange(8)
    with torch.no_grad():
        plain, model = Tied(), away(Tied())
        for _ in range(3):
            assert torch.equal(model(numbers), plain(numbers))
            for each in (plain, model):
                each.kept.mul_(1.1)
        assert model.kept.data_ptr() == model.table.weight.data_ptr()
        assert torch.equal(model.table.weight, plain.table.weight)


# --- modes, errors, threads ---


@pytest.mark.parametrize("context", [torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_other_modes(away, context):
    given = torch.ones(2, 512)
    with torch.no_grad(), context():
        plain = make_model(6, 512)(given).float().sum().item()
    model = away(make_model(6, 512))
    for _ in range(2):
        with torch.no_grad(), context():
            assert model(given).float().sum().item() == plain
    assert are_away(model)
    model(given).sum().backward()


def test_transforms_of_functions(away):
    model = away(make_model(2, 512))
    given = torch.randn(4, 512)
    plain = make_model(2, 512)
    with torch.no_grad():
        for function in (
            lambda each: torch.func.jvp(each, (given,), (given,))[1],
            lambda each: torch.func.vmap(each)(given),
            lambda each: torch.func.functional_call(each, dict(plain.named_parameters()), given),
        ):
            assert torch.allclose(function(model), function(plain))


def test_scripted_traced_and_compiled_layers(away):
    model, given = away(make_model(2, 512)), torch.ones(2, 512)
    with torch.no_grad():
        want = make_model(2, 512)(given)
        assert torch.equal(torch.jit.script(model)(given), want)
        assert torch.equal(torch.jit.trace(model, given, check_trace=False)(given), want)
        assert torch.equal(torch.compile(model, backend="eager")(given), want)


def test_copies_of_modules(away):
    model = away(make_model(2, 512))
    want = evaluate(model, 1)
    assert evaluate(copy.deepcopy(model), 1) == evaluate(pickle.loads(pickle.dumps(model)), 1) == want


def test_with_gradients_weights_come_back(away, lms):
    model = away(make_model(4, 512))
    model(torch.ones(2, 512)).sum().backward()
    assert lms.stats()["streamed_bytes"] == 0
    assert lms.stats()["weight_loaded_bytes"] > 0


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


class Full:
    @staticmethod
    def optional(make):
        raise torch.OutOfMemoryError("planted")


def test_without_room_for_a_copy_the_weight_is_read_where_it_is(away, lms):
    plain = evaluate(make_model(4, 512))
    model = away(make_model(4, 512))
    weights._now.layers._device = Full
    assert evaluate(model) == plain
    assert lms.stats()["streamed_bytes"] == 0
    assert lms.stats()["slow_reads"] == 3 * 4
    assert are_away(model)


def test_threads_that_evaluate_and_one_that_trains(away):
    """A step of the one is seen by the others' next pass."""
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
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    for each in model.parameters():
        each.grad = torch.ones_like(each)
    before = [each.clone() for each in model.parameters()]
    is_over = threading.Event()

    def look():
        while not is_over.is_set():
            evaluate(model, 1)

    looker = threading.Thread(target=look)
    looker.start()
    for _ in range(3):
        optimizer.step()
    is_over.set()
    looker.join()
    assert all(torch.equal(each, old - 1 - 1 - 1) for each, old in zip(model.parameters(), before, strict=True))


def test_ctrl_c_at_any_time_leaves_every_weight_whole(away, lms):
    want = evaluate(make_model(6, 512), 1), content(make_model(6, 512).parameters())
    model = away(make_model(6, 512))
    chooser = random.Random(6)
    with Interrupts(KeyboardInterrupt) as interrupts:
        for _ in range(60):
            interrupts.after(chooser.uniform(1e-4, 5e-3), lambda: evaluate(model, 40), 1)
            assert evaluate(model, 1) == want[0]
    assert interrupts.count > 0
    assert content(model.parameters()) == want[1]
    assert {_core.find(each.data_ptr()).tag for each in model.parameters() if each.nbytes >= MIB} == {TAG}


def test_replacing_and_restoring_can_be_repeated(saver):
    plain = torch.nn.Linear.forward
    replaced = layers.Layers(Full, lambda weight: False, lambda: None)
    with contextlib.ExitStack() as stack:
        stack.callback(replaced.restore)
        replaced.replace()
        replaced.replace()
        assert torch.nn.Linear.forward.__wrapped__ is plain
        assert replaced.serve(torch.nn.Linear(1, 1)) and not replaced.serve(Writing(1, 1))
    replaced.restore()
    assert torch.nn.Linear.forward is plain
