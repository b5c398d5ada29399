"""Large model support: optimizers that hold and call others."""

import pytest

torch = pytest.importorskip("torch")

from ebbtide import _core  # noqa: E402
from ebbtide.lms import optimizer_states  # noqa: E402
from lms_model import MIB, SMALL, computed_once  # noqa: E402
from lms_states import TAG, Training, extension  # noqa: E402

pytestmark = [
    pytest.mark.sim_only,
    pytest.mark.usefixtures("no_states_left"),
]


class Delegate(torch.optim.Optimizer):
    """Calls another optimizer, whose groups and states are its own, as Accelerate's wrapper does."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)

    def zero_grad(self):
        self.optimizer.zero_grad()

    def step(self, closure=None):
        return self.optimizer.step(closure)


class Apart(torch.optim.Optimizer):
    """Has the groups, but states of its own, as torch's ZeroRedundancyOptimizer has."""

    def __init__(self, *optimizers):
        super().__init__([p for each in optimizers for p in each.param_groups[0]["params"]], {})
        self.optimizers = optimizers

    def step(self, closure=None):
        for each in self.optimizers:
            each.step()


class Lookahead(torch.optim.Optimizer):
    """Shares the states of the optimizer that it calls, and adds its own."""

    def __init__(self, optimizer):
        super().__init__(optimizer.param_groups, {})
        self.state, self.base, self.count = optimizer.state, optimizer, 0

    @torch.no_grad()
    def step(self, closure=None):
        self.base.step()
        self.count += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if "slow" not in state:
                    state["slow"] = parameter.clone()
                if self.count % 2 == 0:
                    state["slow"].lerp_(parameter, 0.5)
                    parameter.copy_(state["slow"])


def halves(parameters, lr):
    parameters = list(parameters)
    half = len(parameters) // 2
    return Apart(torch.optim.AdamW(parameters[:half], lr), torch.optim.AdamW(parameters[half:], lr))


CALLING = {
    "delegate": lambda parameters, lr: Delegate(torch.optim.AdamW(parameters, lr)),
    "apart": lambda parameters, lr: Apart(torch.optim.AdamW(parameters, lr)),
    "several": halves,
    "in a wrapper": lambda parameters, lr: Delegate(Delegate(torch.optim.AdamW(parameters, lr))),
    "lookahead": lambda parameters, lr: Lookahead(torch.optim.AdamW(parameters, lr)),
}


def all_states(optimizer):
    found = [each for state in optimizer.state.values() for each in state.values()]
    for inner in getattr(optimizer, "optimizers", ()):
        found += [each for state in inner.state.values() for each in state.values()]
    return [each for each in found if each.nbytes >= MIB]


def train(make, steps=5, after_first=lambda: None):
    training, losses = Training(make=make), []
    for step in range(steps):
        losses.append(training.step())
        if step == 0:
            after_first()
    return training, (losses, [each.sum().item() for each in training.model.parameters()])


train_plainly = computed_once(lambda make: train(make)[1])


@pytest.mark.parametrize("make", CALLING.values(), ids=CALLING)
def test_the_steps_that_others_call_run_in_pieces(lms, monkeypatch, make):
    monkeypatch.setattr(optimizer_states, "_bring_states_back", lambda *_: None)
    plain = train_plainly(make)
    with lms.enable(limit="1GiB", min_size=SMALL):
        training, found = train(make, after_first=lambda: extension().send_states_away(2**62))
        assert found == plain
        numbers = lms.stats()
        assert numbers["streamed_bytes"] >= 4 * 16 * MIB
        assert numbers["state_loaded_bytes"] == numbers["slow_reads"] == 0
        assert all(_core.find(each.data_ptr()).tag == TAG for each in all_states(training.optimizer))


@pytest.mark.parametrize("make", CALLING.values(), ids=CALLING)
@pytest.mark.parametrize("limit", ["30MiB", "24MiB"])
def test_within_a_limit(lms, make, limit):
    plain = train_plainly(make)
    with lms.enable(limit=limit, min_size=SMALL):
        assert train(make)[1] == plain
        assert lms.stats()["streamed_bytes"] > 0


def test_one_that_holds_another_and_does_not_call_it(lms):
    """Its states come back before its steps, from the second one on."""

    class Own(torch.optim.Optimizer):
        def __init__(self, parameters, lr):
            super().__init__(parameters, {"lr": lr})
            self.held = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for each in group["params"]:
                    state = self.state[each]
                    state.setdefault("mean", torch.zeros_like(each)).lerp_(each.grad, 0.1)
                    each.sub_(state["mean"], alpha=group["lr"])

    plain = train(Own)[1]
    with lms.enable(limit="1GiB", min_size=SMALL):
        assert train(Own, after_first=lambda: extension().send_states_away(2**62))[1] == plain
        assert lms.stats()["slow_reads"] == 0
        assert lms.stats()["state_loaded_bytes"] >= 8 * MIB


@pytest.mark.parametrize("limit", ["1GiB", "30MiB"])
def test_a_wrapper_whose_first_step_does_nothing(lms, limit):
    """As Accelerate's where gradients are accumulated."""

    class Skipping(Delegate):
        count = 0

        def step(self, closure=None):
            self.count += 1
            return None if self.count % 2 else self.optimizer.step(closure)

    def make(parameters, lr):
        return Skipping(torch.optim.AdamW(parameters, lr))

    plain = train(make, steps=8)[1]
    with lms.enable(limit=limit, min_size=SMALL):
        assert train(make, steps=8)[1] == plain
        assert lms.stats()["streamed_bytes"] > 0 or limit == "1GiB"
        assert lms.stats()["slow_reads"] == 0


def test_the_step_of_the_base_is_no_step_of_its_own(lms):
    class Doubled(torch.optim.AdamW):
        def step(self, closure=None):
            super().step()
            super().step()

    plain = train(Doubled)[1]
    with lms.enable(limit="24MiB", min_size=SMALL):
        assert train(Doubled)[1] == plain


def test_a_step_that_fails_inside_another_one(lms):
    class Failing(Delegate):
        def step(self, closure=None):
            self.optimizer.step()
            raise ArithmeticError

    with lms.enable(limit="24MiB", min_size=SMALL):
        training = Training(make=lambda parameters, lr: Failing(torch.optim.AdamW(parameters, lr)))
        for _ in range(3):
            with pytest.raises(ArithmeticError):
                training.step()
        assert optimizer_states._outers.open == []
        inner = training.optimizer.optimizer
        assert {int(state["step"]) for state in inner.state.values()} == {3}
