"""Large model support: once memory was short of weights, gradients go to homes on the host, step after step."""

import copy
import gc
import threading

import pytest

torch = pytest.importorskip("torch")

from ebbtide import _core  # noqa: E402
from ebbtide.lms import weights  # noqa: E402
from lms_model import MIB, SMALL, make_model  # noqa: E402
from lms_states import Training, content, extension  # noqa: E402
from lms_weights import GRADIENTS, in_use, on_host, send_all_away, tag_of  # noqa: E402

pytestmark = [
    pytest.mark.sim_only,
    pytest.mark.usefixtures("no_weights_left"),
]


def gradients(model):
    return [each.grad for each in model.parameters() if each.nbytes >= MIB]


def host_bytes():
    status = _core.query_tag(GRADIENTS)
    return 0 if status is None else status.host_bytes


def test_where_memory_is_not_short_gradients_stay_what_they_are(lms):
    lms.enable(limit="1GiB", min_size=SMALL)
    training = Training(depth=4)
    training.step()
    assert [tag_of(each) for each in gradients(training.model)] == ["lms"] * 4
    extension().send_states_away(2**62)
    training.step()
    assert [tag_of(each) for each in gradients(training.model)] == ["lms"] * 4
    assert host_bytes() == 0


def test_homes_are_used_again(short):
    training, seen = Training(depth=4), []
    for _ in range(5):
        training.step()
        assert on_host(*gradients(training.model)) == gradients(training.model)
        seen.append((sorted(each.data_ptr() for each in gradients(training.model)), host_bytes()))
        numbers = short.stats()
    assert seen == [seen[0]] * 5
    assert host_bytes() == 4 * MIB
    moved = numbers["weight_evicted_bytes"] + numbers["weight_loaded_bytes"]
    training.step()
    numbers = short.stats()
    assert numbers["weight_evicted_bytes"] + numbers["weight_loaded_bytes"] == moved


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.AdamW,
        lambda parameters, lr: torch.optim.SGD(parameters, lr, momentum=0.9),
        lambda parameters, lr: torch.optim.Adam(parameters, lr, fused=True),
        torch.optim.Adafactor,
    ],
    ids=["AdamW", "SGD", "fused", "Adafactor"],
)
def test_training(short, make):
    def train():
        training, losses = Training(make=make), []
        for step in range(6):
            if step == 3:
                torch.nn.utils.clip_grad_norm_(training.model.parameters(), 0.1)
            losses.append(training.step(128 + 64 * step))
        return losses, training.result(), content(gradients(training.model))

    found = train()
    short.disable()
    assert train() == found


def test_accumulation_zeroing_and_gradients_that_are_kept(short):
    def train():
        training, kept = Training(depth=4), []
        for step in range(6):
            training.forward().backward()
            if step == 2:
                kept = gradients(training.model)
            if step % 2:
                training.optimizer.step()
                training.optimizer.zero_grad(set_to_none=step != 3)
        return training.result(), content(kept), content(copy.deepcopy(kept))

    found = train()
    short.disable()
    assert train() == found


def test_a_gradient_outlives_its_model_and_lms(short):
    training = Training(depth=2)
    training.forward().backward()
    kept = gradients(training.model)
    want = content(kept)
    del training
    short.disable()
    assert content(kept) == want
    kept[0].add_(1)
    del kept
    gc.collect()
    short.enable(limit="1GiB", min_size=SMALL)
    short.disable()
    assert _core.query_tag(GRADIENTS) is None or _core.query_tag(GRADIENTS).resident_bytes == 0


def test_a_new_limit_gives_homes_back(short):
    training = Training(depth=4)
    training.step()
    training.optimizer.zero_grad()
    assert host_bytes() == 4 * MIB
    short.limit = "2GiB"
    training.step()
    assert [tag_of(each) for each in gradients(training.model)] == ["lms"] * 4


def test_homes_of_models_that_are_gone_are_given_back(short):
    for width in range(512, 1024, 64):
        training = Training(depth=2, width=width)
        training.step()
        training.step()
        whole = sum(each.nbytes // (2 * MIB) + 1 for each in gradients(training.model)) * 2 * MIB
        assert 0 < host_bytes() <= whole + 20 * MIB, "a segment of torch's has 20 MiB"
        del training
        gc.collect()


def test_homes_with_another_holder_are_made_again(short):
    training = Training(depth=2)
    training.step()
    kept = gradients(training.model)
    for _ in range(3):
        training.step()
    assert not {each.data_ptr() for each in kept} & {each.data_ptr() for each in gradients(training.model)}
    del kept
    training.step()
    assert on_host(*gradients(training.model)) == gradients(training.model)


def test_homes_that_are_lent_when_the_limit_changes_are_given_back_later(short):
    training = Training(depth=4)
    training.step()
    assert host_bytes() == 4 * MIB
    short.limit = "2GiB"
    training.step()
    training.step()
    torch.empty(1)
    extension().allow_gradient_homes(True)
    weights._trim_gradients()
    assert host_bytes() == 0


def test_captures_are_left_alone(short, monkeypatch):
    monkeypatch.setattr(weights.captures, "is_capturing", lambda: True)
    training = Training(depth=2)
    training.forward().backward()
    assert [tag_of(each) for each in gradients(training.model)] == ["lms"] * 2


def test_another_thread_moves_nothing_while_a_gradient_is_copied(short):
    """A layer whose input needs no gradient unpacks no weight in backward, so nothing else announces the use."""
    layer = torch.nn.Linear(512, 512)
    is_over, moved = threading.Event(), []

    def move():
        while not is_over.is_set():
            extension().bring_weights_back(2**62)
            moved.append(send_all_away())

    given = torch.randn(64, 512)
    layer(given).sum().backward()
    want = layer.weight.grad.clone()
    mover = threading.Thread(target=move)
    mover.start()
    try:
        for _ in range(100):
            layer.weight.grad = None
            layer(given).sum().backward()
            with in_use():
                assert torch.equal(layer.weight.grad, want)
    finally:
        is_over.set()
        mover.join()
    assert sum(moved) > 0


def test_who_resizes_or_takes_the_memory_gets_its_own(short):
    training = Training(depth=2)
    training.forward().backward()
    one, other = gradients(training.model)
    want = one.sum().item()
    one.untyped_storage().resize_(2 * one.nbytes)
    assert one.sum().item() == want
    shared = other.untyped_storage()
    training.optimizer.zero_grad()
    training.forward().backward()
    assert shared.data_ptr() not in [each.data_ptr() for each in gradients(training.model)]


def test_threads_train_at_once(lms):
    def train():
        trainings, found = [Training(depth=4) for _ in range(3)], {}

        def work(number):
            losses = [trainings[number].step(64 + number) for _ in range(5)]
            found[number] = losses, content(gradients(trainings[number].model))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        return found

    plain = train()
    lms.enable(limit="1GiB", min_size=SMALL)
    keeper = make_model(1, 512)
    send_all_away()
    assert train() == plain
    assert keeper is not None


def test_parameters_with_homes_can_be_swapped(short):
    training = Training(depth=2)
    training.step()
    training.optimizer.zero_grad()
    training.optimizer.state.clear()
    del training.optimizer
    weight = training.model[0].weight
    gc.collect()
    torch.utils.swap_tensors(weight, torch.nn.Parameter(torch.ones(512, 512)))
    assert weight[0, 0] == 1
