"""Large model support: gradients are copied home beside backward, whatever a program does to them meanwhile."""

import functools
import random

import pytest

torch = pytest.importorskip("torch")

from ebbtide.lms import weights  # noqa: E402
from lms_model import MIB  # noqa: E402
from lms_states import Training, content  # noqa: E402
from lms_weights import on_host, tag_of  # noqa: E402

pytestmark = [pytest.mark.sim_only, pytest.mark.usefixtures("no_weights_left")]

DEPTH = 6  # of 1 MiB each


def weights_of(training):
    return [each for each in training.model.parameters() if each.nbytes >= MIB]


def backward(training, on_activation):
    """on_activation: called within the backward, with how many modules there are before."""

    def call(number, _):
        on_activation(number)

    hidden = torch.randn(64, training.width, generator=training.generator)
    for number, module in enumerate(training.model):
        hidden = module(hidden)
        hidden.register_hook(functools.partial(call, number))
    hidden.pow(2).mean().backward()


def fail():
    raise ArithmeticError


def accumulate_again(weight):
    with torch.enable_grad():
        weight.pow(2).sum().backward()


def set_data(weight):
    weight.grad.data = weight.grad * 3


def resize(storage, kept):
    if storage.resizable() and not kept:  # NumPy or DLPack would be left with memory that is gone
        storage.resize_(2 * storage.nbytes())


def fill_grown(gradients):
    for each in gradients:
        torch.empty(0).set_(each.untyped_storage())[each.numel() :].fill_(7)


# What hooks may do to a gradient that another parameter has by then. `kept` outlives the backward.
TROUBLES = {
    "write": lambda weight, kept: weight.grad.mul_(1.5),
    "write through NumPy": lambda weight, kept: weight.grad.numpy().__imul__(0.5),
    "drop": lambda weight, kept: setattr(weight, "grad", None),
    "replace": lambda weight, kept: setattr(weight, "grad", weight.grad.clone()),
    "keep": lambda weight, kept: kept.append(weight.grad),
    "keep a view": lambda weight, kept: kept.append(weight.grad[:7]),
    "keep a detached": lambda weight, kept: kept.append(weight.grad.detach()),
    "keep for DLPack": lambda weight, kept: kept.append(torch.from_dlpack(weight.grad)),
    "keep the storage": lambda weight, kept: kept.append(torch.empty(0).set_(weight.grad.untyped_storage(), 0, (9,))),
    "resize": lambda weight, kept: resize(weight.grad.untyped_storage(), kept),
    "set": lambda weight, kept: set_data(weight),
    "accumulate again": lambda weight, kept: accumulate_again(weight),
    "fail": lambda weight, kept: fail(),
}


@pytest.mark.parametrize("seed", range(24))
def test_troubles(short, monkeypatch, seed):
    monkeypatch.setattr(weights, "_PART_ON_ITS_WAY", random.Random(seed).choice([2**62, 1024, 64]))

    def train():
        choices, training, kept, seen = random.Random(seed), Training(depth=DEPTH), [], []
        troubles = choices.sample(sorted(TROUBLES), 4)

        def on_activation(number):
            weight = choices.choice(weights_of(training))
            trouble = choices.choice(troubles)
            if weight.grad is not None and choices.random() < 0.5:
                TROUBLES[trouble](weight, kept)

        for step in range(8):
            try:
                backward(training, on_activation)
            except ArithmeticError:
                seen.append("failed")
            fill_grown(each.grad for each in weights_of(training) if each.grad is not None)
            seen += content([each.grad for each in weights_of(training) if each.grad is not None])
            seen += content(each.contiguous() for each in kept)
            if step % 2:
                training.optimizer.step()
                training.optimizer.zero_grad()
                kept.clear()
        return seen, training.result()

    found = train()
    short.disable()
    assert train() == found


@pytest.mark.parametrize(
    ("part", "has_ranks", "most"), [(64, False, DEPTH - 1), (512, False, 2), (2**62, False, 0), (64, True, 0)]
)
def test_some_are_on_their_way(short, monkeypatch, part, has_ranks, most):
    """The first layer's gradient comes after all activations."""
    monkeypatch.setattr(weights, "_PART_ON_ITS_WAY", part)
    monkeypatch.setattr(weights, "has_ranks", lambda: has_ranks)
    training, here = Training(depth=DEPTH), []

    def on_activation(number):
        gradients = [each.grad for each in weights_of(training) if each.grad is not None]
        here.append(len(gradients) - len(on_host(*gradients)))

    training.step()
    for _ in range(2):
        here.clear()
        training.optimizer.zero_grad()
        backward(training, on_activation)
        assert max(here) == most
        assert all(tag_of(each.grad) == "lms.gradients" for each in weights_of(training))


def add_hook(weight, hook):
    weight.register_post_accumulate_grad_hook(hook)


def add_node_hook(weight, hook):
    """As DistributedDataParallel and its like do. The node lives as long as the graph."""
    weight.view_as(weight).grad_fn.next_functions[0][0].register_hook(lambda *_: hook(weight))


@pytest.mark.parametrize("add", [add_hook, add_node_hook])
def test_hooks_of_the_parameter_find_it_at_home(short, add):
    """They may write it past torch, as by an operation of their own or another library's. Gradients that are expanded
    are copied by torch, so that it holds none of them itself.
    """

    def train():
        training, tags = Training(depth=DEPTH), []

        def halve(weight):
            tags.append(tag_of(weight.grad))
            weight.grad.data.mul_(0.5)

        for step in range(3):
            loss = sum(each.sum() * number for number, each in enumerate(weights_of(training)))
            if step == 1:
                for each in weights_of(training):
                    add(each, halve)
            loss.backward()
            training.optimizer.step()
            training.optimizer.zero_grad()
        return tags, training.result()

    tags, found = train()
    assert set(tags) == {"lms.gradients"}
    assert len(tags) >= DEPTH
    short.disable()
    assert train()[1] == found


def test_homes_are_free_after_a_backward_that_fails(short):
    training = Training(depth=DEPTH)
    training.step()
    homes = {each.grad.data_ptr() for each in weights_of(training)}
    training.optimizer.zero_grad()
    with pytest.raises(ArithmeticError):
        backward(training, lambda number: None if number else fail())
    gradients = [each.grad for each in weights_of(training) if each.grad is not None]
    assert len(gradients) == DEPTH - 1
    assert not on_host(*gradients)
    del gradients
    moved = short.stats()["weight_evicted_bytes"]
    training.step()
    assert {each.grad.data_ptr() for each in weights_of(training)} == homes
    assert short.stats()["weight_evicted_bytes"] == moved, "no home is made again"


def test_it_ends_within_a_backward(short):
    def train(end):
        training = Training(depth=DEPTH)
        training.step()
        training.optimizer.zero_grad()
        backward(training, lambda number: end() if number == DEPTH else None)
        return content([each.grad for each in weights_of(training)])

    found = train(short.disable)
    assert train(int) == found


def test_a_gradient_that_is_accumulated_by_hand(short):
    training = Training(depth=DEPTH)
    training.step()
    training.optimizer.zero_grad()
    weight = weights_of(training)[0]
    weight.view_as(weight).grad_fn.next_functions[0][0](torch.full_like(weight, 3))
    assert tag_of(weight.grad) == "lms.gradients"
    assert weight.grad.eq(3).all()


def test_inference_mode(short):
    """What is made there has no version: such a gradient stays, and what is unpacked for it is an ordinary tensor."""

    def train():
        training = Training(depth=DEPTH)
        training.step()
        loss = training.forward(256)
        training.optimizer.zero_grad()
        with torch.inference_mode():
            loss.backward()
        gradients = [each.grad for each in weights_of(training)]
        assert "lms.gradients" not in map(tag_of, gradients)
        return content(gradients)

    found = train()
    short.disable()
    assert train() == found
