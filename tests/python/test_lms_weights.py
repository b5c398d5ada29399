"""Large model support: weights leave the device where memory stays short without them, and come by module."""

import contextlib
import copy
import io

import pytest

torch = pytest.importorskip("torch")

from ebbtide import _core  # noqa: E402
from ebbtide.saver.reclaim import torch_cache  # noqa: E402
from lms_model import MIB, SMALL, make_model  # noqa: E402
from lms_states import content  # noqa: E402
from lms_weights import (  # noqa: E402
    DEPTH,
    LIMIT,
    TAG,
    Own,
    evaluate,
    make_own_model,
    on_host,
    send_all_away,
    tag_of,
)

pytestmark = [  # tests/gpu/test_gpu_lms.py is for GPUs
    pytest.mark.sim_only,
    pytest.mark.usefixtures("no_weights_left"),
]


# --- forward by module ---


def test_a_model_of_twice_the_limit_is_made_and_evaluated(lms):
    plain = evaluate(make_own_model(DEPTH, 512))
    with lms.enable(limit=LIMIT, min_size=SMALL):
        model = make_own_model(DEPTH, 512)
        assert {tag_of(layer.weight) for layer in model[::2]} == {TAG}
        assert tag_of(model[0].bias) == "lms", "small ones stay"
        assert evaluate(model) == plain
        numbers = lms.stats()
        assert numbers["peak_device_bytes"] <= LIMIT
        assert numbers["weight_loaded_bytes"] > 0
        assert numbers["slow_reads"] == 0
        assert "weights left" in lms.report()


def test_the_weights_used_last_leave_so_that_a_part_stays(lms):
    """Least recently used weights would be those that are wanted next: each forward would load all of them."""
    with lms.enable(limit=LIMIT, min_size=SMALL):
        model = make_own_model(DEPTH, 512)
        evaluate(model, 2)
        before = lms.stats()["weight_loaded_bytes"]
        evaluate(model, 4)
        loaded = lms.stats()["weight_loaded_bytes"] - before
        assert 0 < loaded <= 4 * (DEPTH - 2) * MIB


def test_with_room_nothing_leaves(lms):
    plain = evaluate(make_model(DEPTH, 512))
    with lms.enable(limit="1GiB", min_size=SMALL):
        assert evaluate(make_model(DEPTH, 512)) == plain
        assert lms.stats()["weight_evicted_bytes"] == lms.stats()["weight_host_bytes"] == 0


def test_weights_can_be_read_and_written_anywhere_while_they_are_on_the_host(lms):
    plain = make_model(DEPTH, 512)
    want = content(plain.parameters())
    with torch.no_grad():
        for each in plain.parameters():
            each.mul_(1.5)
    want_then = content(plain.parameters())
    lms.enable(limit="1GiB", min_size=SMALL)
    model = make_model(DEPTH, 512)
    addresses = [each.data_ptr() for each in model.parameters()]
    assert send_all_away() >= DEPTH * MIB
    assert content(model.parameters()) == want, "raw reads"
    assert len(on_host(*model.parameters())) == DEPTH
    with torch.no_grad():
        for each in model.parameters():
            each.mul_(1.5)
    assert content(model.parameters()) == want_then
    assert evaluate(model) == evaluate(plain)
    assert on_host(*model.parameters()) == []
    assert addresses == [each.data_ptr() for each in model.parameters()]


def test_uses_without_room_are_counted_as_slow_reads(lms, saver):
    plain = evaluate(make_model(2, 512))
    lms.enable(limit="1GiB", min_size=SMALL)
    model = make_model(2, 512)
    send_all_away()
    torch_cache.give_back()  # what other tests have cached would make room
    saver.configure(device_limit=_core.query_device(0).held_bytes)
    try:
        assert evaluate(model) == plain
    finally:
        saver.configure(device_limit=None)
    assert lms.stats()["slow_reads"] > 0


def test_the_weights_of_a_module_that_runs_stay_while_others_come(lms):
    class Outer(Own):
        def forward(self, given):
            hidden = self.inner(given)
            self.away = [bool(on_host(weight)) for weight in (self.weight, self.inner.weight)]
            return super().forward(hidden)

    lms.enable(limit="16MiB", min_size=SMALL)
    outer = Outer(5120, 512, bias=False)  # 10 MiB: smaller weights would share an allocation
    outer.inner = Own(512, 5120, bias=False)
    evaluate(outer, 1)
    assert outer.away == [False, True]


# --- which parameters ---


def test_tied_and_shared_weights_and_views(lms):
    def build():
        torch.manual_seed(0)
        model = torch.nn.ModuleDict({"a": torch.nn.Linear(512, 512), "b": torch.nn.Linear(512, 512)})
        model["b"].weight = model["a"].weight
        return model, model["a"].weight.view(-1)[: 512 * 256].view(256, 512)

    def train(model, view):
        losses = []
        for _ in range(3):
            hidden = model["b"](torch.relu(model["a"](torch.ones(64, 512) / 50)))
            loss = (hidden @ view.T).pow(2).mean()
            loss.backward()
            with torch.no_grad():
                for each in model.parameters():
                    each.sub_(each.grad, alpha=1e-2)
                    each.grad = None
            if _core.find(model["a"].weight.data_ptr()) is not None:
                send_all_away()
                assert view.data_ptr() == model["a"].weight.data_ptr() == model["b"].weight.data_ptr()
            losses.append(loss.item())
        return losses

    plain = train(*build())
    lms.enable(limit="1GiB", min_size=SMALL)
    assert train(*build()) == plain
    assert lms.stats()["weight_loaded_bytes"] > 0


@pytest.mark.parametrize("kind", ["detached", "numpy", "frozen numpy", "dlpack", "graph"])
def test_a_parameter_whose_memory_is_known_elsewhere_stays(lms, kind):
    lms.enable(limit="1GiB", min_size=SMALL)
    data = torch.ones(512, 512)
    parameter = torch.nn.Parameter(data, requires_grad=kind != "frozen numpy")
    if kind != "detached":
        del data
    other = {
        "detached": lambda: data,
        "numpy": lambda: parameter.detach().numpy(),
        "frozen numpy": lambda: parameter.numpy(),
        "dlpack": lambda: torch.utils.dlpack.to_dlpack(parameter.detach()),
        "graph": lambda: (parameter * parameter).sum(),
    }
    keeper = None
    with contextlib.suppress(KeyError, RuntimeError):
        keeper = other[kind]()
    assert keeper is not None
    module = torch.nn.Module()
    module.weight = parameter
    assert tag_of(parameter) == "lms"


def test_frozen_parameters_leave_too(lms):
    lms.enable(limit="1GiB", min_size=SMALL)
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.ones(512, 512), requires_grad=False)
    assert tag_of(module.weight) == TAG
    model = make_model(2, 512).requires_grad_(False)
    send_all_away()
    assert len(on_host(module.weight, model[0].weight, model[2].weight)) == 3


def test_parameters_get_their_tag_at_the_next_forward_where_registration_missed_it(lms):
    lms.enable(limit="1GiB", min_size=SMALL)
    model = copy.deepcopy(make_model(2, 512))
    assert tag_of(model[0].weight) == "lms"
    with torch.no_grad():
        model(torch.randn(4, 512))
    assert tag_of(model[0].weight) == tag_of(model[2].weight) == TAG


def test_a_model_that_is_converted_may_become_larger_than_the_limit(lms):
    model = make_model(8, 512)  # 8 MiB
    given = torch.randn(4, 512, dtype=torch.float64)
    with torch.no_grad():
        plain = copy.deepcopy(model).double()(given)
    unwrapped = torch.nn.Module._apply
    with lms.enable(limit="12MiB", min_size=SMALL):
        assert model.double() is model
        assert {tag_of(part.weight) for part in model[::2]} == {TAG}
        assert lms.stats()["weight_host_bytes"] > 0
        with torch.no_grad():
            assert torch.equal(model(given), plain)
    assert torch.nn.Module._apply is unwrapped


def test_a_wrapper_of_another_library_around_conversions_stays(lms):
    plain = torch.nn.Module._apply
    calls = []
    lms.enable(limit="1GiB", min_size=SMALL)
    ours = torch.nn.Module._apply
    torch.nn.Module._apply = lambda module, *arguments, **options: (
        calls.append(module),
        ours(module, *arguments, **options),
    )[1]
    try:
        theirs = torch.nn.Module._apply
        for _ in range(2):
            lms.disable()
            assert torch.nn.Module._apply is theirs
            lms.enable(limit="1GiB", min_size=SMALL)
        model = make_model(1, 512).double()
        assert tag_of(model[0].weight) == TAG and calls
    finally:
        torch.nn.Module._apply = ours
        lms.disable()
    assert torch.nn.Module._apply is plain


def test_functional_calls_vmap_and_parametrizations(lms):
    def calls():
        model = make_model(2, 512)
        given = torch.ones(8, 512) / 10
        other = {name: each.detach() * 2 for name, each in model.named_parameters()}
        found = [torch.func.functional_call(model, other, (given,)).sum().item()]
        torch.nn.utils.parametrizations.weight_norm(model[0])
        found.append(model(given).sum().item())
        if lms.enabled:
            send_all_away()
        found.append(model(given).sum().item())
        return found

    plain = calls()
    lms.enable(limit="1GiB", min_size=SMALL)
    assert calls() == plain


def test_checkpoints_and_copies_of_a_model_on_the_host(lms):
    plain = make_model(4, 512)
    want = content(plain.parameters())
    lms.enable(limit=4 * MIB, min_size=SMALL)
    model = make_model(4, 512)
    assert on_host(*model.parameters()) != []
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    lms.disable()  # a copy needs more than the limit
    other = copy.deepcopy(model)
    assert content(other.parameters()) == content(model.parameters()) == want
    file.seek(0)
    with torch.no_grad():
        for each in model.parameters():
            each.zero_()
    model.load_state_dict(torch.load(file))
    assert content(model.parameters()) == want
    assert not model._forward_pre_hooks and not model._forward_hooks


@pytest.mark.filterwarnings("error:Using .torch.compile")
def test_a_compiled_module(lms):
    torch._dynamo.reset()
    model = make_model(4, 512)
    plain = evaluate(model)
    lms.enable(limit="1GiB", min_size=SMALL)
    model = make_model(4, 512)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert evaluate(compiled) == plain
    send_all_away()
    before = lms.stats()["weight_loaded_bytes"]
    assert evaluate(compiled) == plain
    assert lms.stats()["weight_loaded_bytes"] - before >= 4 * MIB


def test_modules_of_torchscript_run(lms):
    torch.nn.Linear(512, 512)
    scripted = torch.jit.script(torch.nn.Linear(512, 512))
    inputs = torch.ones(2, 512)
    plain = scripted(inputs)
    lms.enable("1GiB", min_size="64KiB")
    torch.nn.Linear(512, 512)  # so that there are weights to follow
    assert torch.equal(scripted(inputs), plain)


def test_parameters_can_be_swapped(lms):
    """torch refuses that where there is a weak reference."""
    lms.enable("1GiB", min_size="64KiB")
    first, second = torch.nn.Linear(512, 512), torch.nn.Linear(512, 512)
    want = second.weight.detach().clone()
    torch.utils.swap_tensors(first.weight, second.weight)
    assert torch.equal(first.weight, want)


def test_lms_can_be_enabled_after_a_backward_that_disabled_it(lms):
    lms.enable("1GiB", min_size="64KiB")
    layer = torch.nn.Linear(512, 512)
    layer.weight.register_hook(lambda gradient: lms.disable())
    layer(torch.ones(2, 512)).sum().backward()
    lms.enable("1GiB", min_size="64KiB")
    assert lms.enabled
    layer(torch.ones(2, 512)).sum()


def test_blocks_that_are_compiled_in_place_use_their_weights(lms):
    lms.enable(limit="1GiB", min_size=SMALL)
    model = make_model(2, 512)
    model[0].compile(backend="eager")
    model(torch.ones(1, 512))
    assert send_all_away() > 0 and on_host(model[0].weight)
    model(torch.ones(1, 512))
    assert not on_host(model[0].weight)


def test_parameters_that_are_frozen_when_they_are_made_are_followed_later(lms):
    lms.enable(limit="1GiB", min_size=SMALL)
    model = make_model(2, 512)
    late = torch.nn.Parameter(torch.randn(512, 512), requires_grad=False)
    model[0].weight = late
    assert not late.requires_grad
    evaluate(model, 1)
    late.requires_grad_(True)
    assert send_all_away() > 0
    model(torch.ones(2, 512)).sum().backward()
    assert [tag_of(model[number].weight.grad) for number in (0, 2)] == ["lms.gradients"] * 2
