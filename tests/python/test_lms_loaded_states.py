"""Large model support: optimizer states that were made outside the step that makes them."""

import pytest

torch = pytest.importorskip("torch")

from ebbtide import _core  # noqa: E402
from ebbtide.lms import devices, loaded_states  # noqa: E402
from lms_model import MIB, SMALL, computed_once  # noqa: E402
from lms_states import TAG, Training, content, extension  # noqa: E402

pytestmark = [
    pytest.mark.sim_only,
    pytest.mark.usefixtures("no_states_left", "quick_scans"),  # it looks for what else refers to loaded states
]


@pytest.fixture
def counters_are_elsewhere(monkeypatch):
    """As on a GPU, where most optimizers count their steps in a tensor on the CPU."""
    is_ordinary = devices.SimulatedDevice.is_ordinary
    monkeypatch.setattr(
        devices.SimulatedDevice, "is_ordinary", lambda self, each: each.numel() > 1 and is_ordinary(self, each)
    )


def are_adopted(optimizer):
    large = [each for state in optimizer.state.values() for each in state.values() if each.nbytes >= MIB]
    return large != [] and all(_core.find(each.data_ptr()).tag == TAG for each in large)


class Wrapped(torch.Tensor):
    """Half as large as it looks, as the states of an optimizer with 8 bits."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.float32, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), options=None):
        plain = [each.inner.float() if isinstance(each, cls) else each for each in arguments]
        if function is torch.ops.aten.copy_.default:
            arguments[0].inner.copy_(plain[1])
            return arguments[0]
        return function(*plain, **(options or {}))


class WithWrappedStates(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["mean"] = Wrapped(torch.zeros_like(parameter, dtype=torch.bfloat16))
            mean = state["mean"] * 0.9 + parameter.grad
            state["mean"].copy_(mean)
            parameter.sub_(mean * 0.01)


def train_layer(layer, optimizer, given):
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = layer(given).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, optimizer


def train_with_wrapped_states():
    torch.manual_seed(0)
    layer = torch.nn.Linear(512, 512)
    return train_layer(layer, WithWrappedStates(layer.parameters()), torch.randn(8, 512))


def train_with_sparse_states():
    torch.manual_seed(0)
    layer = torch.nn.Embedding(2000, 64, sparse=True)
    return train_layer(layer, torch.optim.SGD(layer.parameters(), 0.1, momentum=0.9), torch.arange(1000))


def train_with_distributed_states():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (1,))
    weight = torch.nn.Parameter(distribute_tensor(torch.randn(512, 512), mesh, [Shard(0)]))
    given = distribute_tensor(torch.randn(64, 512), mesh, [Shard(0)])
    return train_layer(lambda given: given @ weight, torch.optim.AdamW([weight]), given)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("train", [train_with_wrapped_states, train_with_sparse_states, train_with_distributed_states])
def test_states_without_memory_of_their_own(lms, train):
    plain = train()[0]
    lms.enable(limit="64MiB", min_size=SMALL)
    assert train()[0] == plain


@pytest.mark.usefixtures("one_rank")
def test_what_a_wrapper_holds_moves(lms):
    lms.enable(limit="1GiB", min_size=SMALL)
    _, optimizer = train_with_distributed_states()
    (state,) = optimizer.state.values()
    state["exp_avg"] = state["exp_avg"].clone()
    state["max_exp_avg_sq"] = state["exp_avg_sq"].clone()  # one more, so that they are looked at anew
    assert _core.find(state["exp_avg"].to_local().data_ptr()).tag == "lms"
    optimizer.step()
    assert _core.find(state["exp_avg"].to_local().data_ptr()).tag == TAG


def test_a_parameter_that_a_state_refers_to_stays(lms):
    """Its moves are those of weights, which are announced apart."""

    class Block:
        def __init__(self, parameter):
            self.parameter, self.factor = parameter, torch.zeros(512, 512)

    lms.enable(limit="1GiB", min_size=SMALL)
    layer = torch.nn.Linear(512, 512)
    tag = _core.find(layer.weight.data_ptr()).tag
    optimizer = torch.optim.AdamW(layer.parameters())
    _, optimizer = train_layer(layer, optimizer, torch.randn(8, 512))
    optimizer.state[layer.weight].update(
        same=layer.weight, block=Block(layer.weight), many=[layer.weight], late=torch.zeros(512, 512)
    )
    optimizer.step()
    assert _core.find(layer.weight.data_ptr()).tag == tag
    assert _core.find(optimizer.state[layer.weight]["late"].data_ptr()).tag == TAG


def test_states_that_cannot_move_are_not_looked_through_at_each_step(lms, monkeypatch):
    lms.enable(limit="1GiB", min_size=SMALL)
    _, optimizer = train_with_sparse_states()
    looks = []
    movable = loaded_states._movable
    monkeypatch.setattr(loaded_states, "_movable", lambda states: looks.append(1) or movable(states))
    for _ in range(3):
        optimizer.step()
    assert looks == []
    (state,) = optimizer.state.values()
    state["momentum_buffer"] = state["momentum_buffer"].to_dense()
    optimizer.step()
    assert _core.find(state["momentum_buffer"].data_ptr()).tag == TAG


def reload(optimizer):
    saved = optimizer.state_dict()
    states = {
        number: {name: value.clone() for name, value in state.items()} for number, state in saved["state"].items()
    }
    optimizer.load_state_dict({**saved, "state": states})


@pytest.mark.usefixtures("counters_are_elsewhere")
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.Adagrad, {}),
        (torch.optim.SGD, {"momentum": 0.9}),
    ],
    ids=["AdamW", "fused", "Adagrad", "SGD"],
)
def test_loaded_states(lms, make, options):
    lms.enable(limit="1GiB", min_size=SMALL)
    training = Training(make=make, depth=4, **options)
    training.step()
    for _ in range(5):  # the allocator gives the same addresses again
        training.step()
        assert are_adopted(training.optimizer)
        reload(training.optimizer)


class Late(torch.optim.Optimizer):
    """Makes some of its states in its third step."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})
        self.count = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.count += 1
        for group in self.param_groups:
            for each in group["params"]:
                state = self.state[each]
                state.setdefault("mean", torch.zeros_like(each)).lerp_(each.grad, 0.1)
                if self.count == 3:
                    state["slow"] = each.clone()
                each.sub_(state["mean"], alpha=group["lr"])


def test_states_that_come_later_than_others(lms):
    lms.enable(limit="1GiB", min_size=SMALL)
    training = Training(make=Late, depth=4)
    for _ in range(5):
        training.step()
    assert all(len(state) == 2 for state in training.optimizer.state.values())
    assert are_adopted(training.optimizer)


def train_beside_a_state_of_the_program():
    training = Training(make=torch.optim.SGD, momentum=0.9, lr=0.1)
    for each in training.model.parameters():
        training.optimizer.state[each]["frozen"] = 0
    found = []
    for _ in range(4):
        loss = training.step(512)
        found.append((loss, sum("momentum_buffer" in state for state in training.optimizer.state.values())))
    return found, content(training.model.parameters())


train_beside_it_plainly = computed_once(train_beside_a_state_of_the_program)


@pytest.mark.parametrize("limit", [14, 18, 22, 26])
def test_a_state_of_the_program_beside_those_of_sgd(lms, limit):
    """The first step makes the momentum, though there is a state already."""
    plain = train_beside_it_plainly()
    with lms.enable(limit=limit * MIB, min_size=SMALL):
        assert train_beside_a_state_of_the_program() == plain


def test_groups_step_in_their_order(lms, monkeypatch):
    """One that the optimizer refuses keeps those after it from their step, and none before it."""
    from ebbtide.lms import optimizer_states

    monkeypatch.setattr(optimizer_states, "_bring_states_back", lambda *_: None)

    def run(away):
        training = Training(depth=4)
        parameters = list(training.model.parameters())
        groups = [{"params": parameters[:2]}, {"params": parameters[2:4]}, {"params": parameters[4:]}]
        training.optimizer = torch.optim.AdamW(groups, 1e-3)
        training.step()
        away()
        training.optimizer.zero_grad()
        training.forward().backward()
        parameters[2].grad = parameters[2].grad.to_sparse()
        with pytest.raises(RuntimeError, match="sparse"):
            training.optimizer.step()
        return [int(training.optimizer.state[each]["step"]) for each in parameters], content(parameters)

    plain = run(lambda: None)
    with lms.enable(limit="1GiB", min_size=SMALL):
        assert run(lambda: extension().send_states_away(2**62)) == plain
        assert extension().state_host_bytes() > 0
