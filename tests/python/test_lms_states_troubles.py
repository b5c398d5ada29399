"""Optimizer states of large model support where something else happens: errors, threads, budgets that are gone."""

import gc
import random
import threading
import warnings

import pytest

torch = pytest.importorskip("torch")

from core_sim import OUT_OF_MEMORY, UNKNOWN, Sim  # noqa: E402
from ebbtide import _core  # noqa: E402
from lms_model import MIB, SMALL  # noqa: E402
from lms_states import FOR_GROWING, GROWING, STEADY, TAG, Interrupts, Training, extension, run_plainly  # noqa: E402

pytestmark = [  # tests/gpu/test_gpu_lms.py is for GPUs
    pytest.mark.sim_only,
    pytest.mark.usefixtures("no_states_left"),
]


class Failing(torch.optim.AdamW):
    fails = True

    def step(self, closure=None):
        result = super().step(closure)
        if Failing.fails:
            raise ValueError("planted")
        return result


def test_exceptions_leave_no_region_open(lms, saver):
    lms.enable(limit="1GiB", min_size=SMALL)
    Failing.fails = True
    training = Training(make=Failing, depth=1)
    try:
        training.step()
    except ValueError:
        assert _core.find(torch.empty(1).data_ptr()).tag == "lms", "while the traceback lives, too"
        assert saver.tags()[TAG].lease_count == 0 and not extension().is_in_step()
    else:
        raise AssertionError("the step has not failed")
    Failing.fails = False
    training.step()
    assert extension().send_states_away(2**62) > 0


@pytest.mark.timeout(200)
def test_interrupts_leave_no_region_open(lms, saver):
    chooser = random.Random(2)
    lms.enable(limit="1GiB", min_size=SMALL)
    with Interrupts() as interrupts:
        for _ in range(150):
            training = Training(depth=1, width=256)
            training.forward(16).backward()
            extension().send_states_away(2**62)
            interrupts.after(chooser.uniform(1e-5, 4e-3), training.optimizer.step, 100)
            status = saver.tags().get(TAG)  # None: every step so far was interrupted before its region
            assert status is None or status.lease_count == 0
            assert _core.find(torch.empty(1).data_ptr()).tag == "lms"
    assert interrupts.count > 0


def test_steps_of_fake_tensors_are_left_alone(lms):
    fake_tensor = pytest.importorskip("torch._subclasses.fake_tensor")
    lms.enable(limit="64MiB", min_size=SMALL)
    with warnings.catch_warnings(), fake_tensor.FakeTensorMode():
        warnings.simplefilter("error")
        model = torch.nn.Linear(512, 512)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            model(torch.randn(16, 512)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert isinstance(optimizer.state[model.weight]["exp_avg"], fake_tensor.FakeTensor)


def test_states_beside_a_lazy_parameter_are_states(lms):
    lms.enable(limit="64MiB", min_size=SMALL)
    lazy, weight = torch.nn.UninitializedParameter(), torch.nn.Parameter(torch.randn(512, 512))
    optimizer = torch.optim.AdamW([lazy, weight])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert _core.find(optimizer.state[weight]["exp_avg"].data_ptr()).tag == TAG


def test_what_a_failed_move_left_unmapped_is_mapped_once_it_is_off(lms):
    """No later step announces itself."""
    plain = run_plainly(STEADY[:3])
    training, sim = Training(), Sim()
    with lms.enable(limit="1GiB", min_size=SMALL):
        losses = [training.step() for _ in STEADY[:2]]
        try:
            _fail_midway(sim)
        finally:
            sim.clear_failures()
    assert not _detached()
    losses.append(training.step())
    assert (losses, training.result()) == plain


def test_threads_with_optimizers_of_their_own(lms):
    def work(training, results, index):
        results[index] = [training.step(512) for _ in range(8)]

    def train():
        results = [None] * 3
        trainings = [Training(depth=2, width=512) for _ in range(3)]  # here, since it seeds torch's one generator
        threads = [threading.Thread(target=work, args=(trainings[index], results, index)) for index in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        gc.collect()
        return results

    plain = train()
    with lms.enable(limit=2 * FOR_GROWING, min_size=SMALL):
        is_over = threading.Event()

        def move():
            while not is_over.is_set():
                extension().send_states_away(4 * MIB)

        mover = threading.Thread(target=move)
        mover.start()
        try:
            found = train()
        finally:
            is_over.set()
            mover.join()
        assert found == plain
        assert lms.stats()["peak_device_bytes"] <= 2 * FOR_GROWING


@pytest.mark.parametrize(
    "function",
    ["cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemcpyDtoDAsync", "cuMemAddressReserve"],
)
@pytest.mark.parametrize("code", [OUT_OF_MEMORY, UNKNOWN])
def test_driver_calls_that_fail_in_a_move(lms, function, code):
    sim = Sim()
    plain = run_plainly(STEADY, depth=2)
    lms.enable(limit="1GiB", min_size=SMALL)
    training, losses = Training(depth=2), []
    losses.append(training.step())
    want = [each.clone() for each in training.states()]
    moves = [extension().send_states_away, extension().bring_states_back]
    try:
        for k in range(1, 9):
            for move in moves:
                sim.fail(function, k, code)
                move(2**62)
                sim.clear_failures()
                assert all(map(torch.equal, want, training.states()))
    finally:
        sim.clear_failures()
    assert extension().bring_states_back(2**62) >= 0
    losses += [training.step() for _ in STEADY[1:]]
    assert (losses, training.result()) == plain
    assert lms.stats()["state_host_bytes"] == 0


def test_states_that_no_address_reaches_stop_the_step(lms):
    """The move fails, and so does every way back; no step may touch such states."""
    sim = Sim()
    plain = run_plainly(STEADY, depth=2)
    lms.enable(limit="1GiB", min_size=SMALL)
    training, losses = Training(depth=2), []
    losses.append(training.step())
    training.optimizer.zero_grad()
    loss = training.forward()
    loss.backward()
    try:
        _fail_midway(sim)
        with pytest.raises(RuntimeError, match=r"not mapped since a move failed: .*MemSetAccess"):
            training.optimizer.step()
        assert not extension().is_in_step()
    finally:
        sim.clear_failures()
    training.optimizer.step()
    losses += [loss.item(), *(training.step() for _ in STEADY[2:])]
    assert (losses, training.result()) == plain


def _detached():
    return _core.query_tag(TAG).detached_bytes


def _fail_midway(sim):
    """A move that leaves states unmapped. What would map them fails from then on."""
    # Each of the copies in the host's memory is mapped once; then everything fails.
    k = 1
    while not _detached():
        assert k < 40
        sim.clear_failures()
        sim.fail("cuMemSetAccess", k, UNKNOWN, 1000)
        extension().send_states_away(2**62)
        k += 1


def test_copies_that_fail_in_training(lms):
    """The allocation that demanded them fails, and nothing is lost."""
    plain = run_plainly(GROWING)
    sim = Sim()
    with lms.enable(limit=FOR_GROWING, min_size=SMALL, overflow=False):
        training, losses = Training(), []
        for batch in GROWING[:2]:
            losses.append(training.step(batch))
        sim.fail("cuMemcpyDtoDAsync", 1, UNKNOWN, 1000)
        state = training.generator.get_state()
        with pytest.raises(torch.OutOfMemoryError, match=r"could not leave it: .*MemcpyDtoDAsync"):
            training.step(GROWING[2])
        sim.clear_failures()
        gc.collect()
        training.generator.set_state(state)
        losses += [training.step(batch) for batch in GROWING[2:]]
        assert (losses, training.result()) == plain


def test_a_host_budget_that_is_gone(lms):
    plain = run_plainly(GROWING)
    with lms.enable(limit=FOR_GROWING, min_size=SMALL, host_limit=_core.stats()["host_held_bytes"] + 34 * MIB):
        training, losses = Training(), []
        for batch in GROWING[:2]:
            losses.append(training.step(batch))
        state = training.generator.get_state()
        with pytest.raises(torch.OutOfMemoryError, match="host_limit"):
            training.step(GROWING[2])
        gc.collect()
        lms.enable(limit=FOR_GROWING, min_size=SMALL)
        training.generator.set_state(state)
        losses += [training.step(batch) for batch in GROWING[2:]]
        assert (losses, training.result()) == plain


@pytest.mark.parametrize("room", [True, False])
def test_disable_amid_training(lms, saver, room):
    plain = run_plainly(STEADY)
    lms.enable(limit="1GiB", min_size=SMALL)
    training = Training()
    losses = [training.step() for _ in range(2)]
    extension().send_states_away(2**62)
    if not room:
        saver.configure(device_limit=_core.query_device(0).held_bytes)
    try:
        lms.disable()
        assert lms.stats()["state_host_bytes"] == saver.tags()[TAG].host_bytes
        assert (saver.tags()[TAG].host_bytes == 0) is room
        losses.append(training.step())
        assert (losses, training.result()) == plain
        assert extension().send_states_away(2**62) == 0, "nothing moves by itself"
    finally:
        saver.configure(device_limit=None)
    saver.promote(TAG)
    assert saver.tags()[TAG].host_bytes == 0


class Signum(torch.optim.Optimizer):
    """Its state of a parameter is a tensor, and no dict."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    if parameter not in self.state:
                        self.state[parameter] = torch.zeros_like(parameter)
                    self.state[parameter].mul_(0.9).add_(parameter.grad)
                    parameter.sub_(self.state[parameter].sign() * group["lr"])


def steps_beside_odd_entries(make):
    """A frozen parameter, and an entry of the program's own in the optimizer's states."""
    trained, frozen = (torch.nn.Parameter(torch.ones(1 << 16)) for _ in range(2))
    optimizer = make([trained, frozen], lr=0.1)
    for number in range(3):
        trained.grad = torch.randn(1 << 16, generator=torch.Generator().manual_seed(number))
        if number == 1:
            optimizer.state["ema"] = torch.ones(3)
        optimizer.step()
    return trained.sum().item()


@pytest.mark.parametrize("make", [Signum, torch.optim.AdamW, torch.optim.Adafactor])
def test_states_that_are_tensors_and_not_dicts(lms, make):
    plain = steps_beside_odd_entries(make)
    with lms.enable(limit="1GiB", min_size="16KiB"):
        assert steps_beside_odd_entries(make) == plain


def test_states_of_parameters_that_were_replaced_stand_for_no_others(lms):
    """The new ones are made on the host where they do not fit, although the old ones' entries are as many."""

    def make_parameters():
        return list(torch.nn.ParameterList([torch.nn.Parameter(torch.randn(MIB)) for _ in range(6)]))

    def step():
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.ones(MIB)
        optimizer.step()
        optimizer.zero_grad()

    with lms.enable(limit="56MiB", min_size="16KiB"):
        optimizer = torch.optim.AdamW(make_parameters(), 1e-3)
        for _ in range(2):
            step()
        optimizer.param_groups[0]["params"] = make_parameters()
        step()
        assert lms.stats()["state_host_bytes"] > 48 * MIB
        assert lms.stats()["peak_device_bytes"] <= 56 * MIB
