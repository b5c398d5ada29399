"""The order of copies and kernels of a step in pieces, on a model of CUDA's streams."""

import functools
import random
import weakref
from collections import defaultdict

import pytest

torch = pytest.importorskip("torch")

from cuda_streams import Cuda, Stream  # noqa: E402
from ebbtide.lms.streaming import backward_updates, host_ranges, optimizer_step, step_copies  # noqa: E402
from ebbtide.lms.streaming.step_copies import _CudaLanes  # noqa: E402


class Device:
    @staticmethod
    def optional(make):
        return make()

    @staticmethod
    def allowed_bytes():
        return 0  # the smallest slots


def train(make_step):
    """Three steps of SGD over several chunks of 1 MiB, which has no counters."""
    torch.manual_seed(5)
    parameters = [torch.nn.Parameter(torch.randn(size)) for size in (100_000, 700_000, 300, 260_000)]
    optimizer = torch.optim.SGD(parameters, 0.1, momentum=0.9)
    for _ in range(3):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        make_step(optimizer)
    return parameters, [state["momentum_buffer"] for state in optimizer.state.values()]


def step_on(cuda, monkeypatch):
    plain = torch.optim.SGD.step

    def step(optimizer):
        if not optimizer.state:
            plain(optimizer)
            return
        tensors = [state["momentum_buffer"] for state in optimizer.state.values()]
        tensors += [each for parameter in optimizer.param_groups[0]["params"] for each in (parameter, parameter.grad)]
        hosted = sorted((each.data_ptr(), each.data_ptr() + each.nbytes) for each in tensors[:-2])
        ranges = host_ranges.HostRanges(hosted)
        assert optimizer_step.run(lambda view: cuda.main.run(plain, view), optimizer, Device(), ranges)
        Stream.drain()

    return step


def is_right(seed, monkeypatch):
    chooser = random.Random(seed)
    monkeypatch.setattr(step_copies, "make_lanes", _CudaLanes)
    plain = train(lambda optimizer: optimizer.step())
    cuda = Cuda(monkeypatch, chooser)
    found = train(step_on(cuda, monkeypatch))
    (*_, states), (*_, of_pieces) = plain, found
    return all(map(torch.equal, plain[0], found[0])) and all(map(torch.equal, states, of_pieces))


@pytest.mark.parametrize("seed", range(15))
def test_any_order_that_the_streams_allow_is_right(seed, monkeypatch):
    assert is_right(seed, monkeypatch)


@pytest.mark.parametrize("forgotten", ["arrival", "departure", "slot"])
def test_a_wait_that_is_missing_shows(forgotten, monkeypatch):
    lanes = _CudaLanes
    if forgotten == "arrival":
        monkeypatch.setattr(lanes, "await_copy_in", lambda *_: None)
    number = {"arrival": None, "slot": 1, "departure": 2}[forgotten]  # the streams for copies in, and out
    wait_event = Stream.wait_event

    def forget(stream, event):
        if number is None or stream is not Stream.every[number]:
            wait_event(stream, event)

    monkeypatch.setattr(Stream, "wait_event", forget)
    assert not all(is_right(seed, monkeypatch) for seed in range(10))


# --- updates beside a backward ---


def use_again(stream, tensor):
    """Once the tensor is gone, the stream overwrites its memory."""
    weakref.finalize(tensor, stream.run, tensor.detach().fill_, 77)


def leave_for(make, cuda, home, evicted):
    """Something leaves for each tensor that this makes, which gets its memory: as csrc/torch/lms/ledger_moves.cpp has
    it, after what its stream has queued, and that stream waits for the copy.
    """
    plain, departures = torch.empty, Stream()

    def empty(*arguments, **options):
        assert cuda.current is home, "or torch would hand the memory out again in the order of another stream"
        block = plain(*arguments, **options).fill_(5)
        copy = torch.zeros_like(block)
        departures.wait_stream(home)
        departures.run(copy.copy_, block.detach())
        home.wait_stream(departures)
        evicted.append(copy)
        return block

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", empty)
        return make()


def backward_beside(cuda, monkeypatch, read, evicted):
    """Updates each parameter as its gradient is there, which the main stream computes. It reads them after that."""
    plain = torch.optim.SGD.step

    def make_lanes(kind, slot_bytes, home):
        lanes = leave_for(lambda: _CudaLanes(kind, slot_bytes, home), cuda, home, evicted)
        for slot in lanes.slots:
            use_again(home, slot)
        return lanes

    def queue(part):
        """With the gradients of now: those of whole parameters are gone when it runs."""
        (group,) = part.param_groups
        states, seen = defaultdict(dict), []
        for parameter in group["params"]:
            seen.append(parameter.detach())
            seen[-1].grad, states[seen[-1]] = parameter.grad.detach(), part.state[parameter]
        cuda.current.run(plain, optimizer_step.view_of(part, group, seen, states))

    def update(optimizer, group, parameter, ranges, staging):
        view = optimizer_step.view_of(optimizer, group, [parameter], optimizer.state)
        with optimizer_step.Part(staging):
            assert optimizer_step.run(queue, view, Device(), ranges)

    def step(optimizer):
        if not optimizer.state:
            plain(optimizer)
            return
        (group,) = optimizer.param_groups
        updates = backward_updates.BackwardUpdates()
        for number, parameter in enumerate(group["params"]):
            for _ in range(40):  # it is behind
                cuda.main.run(int)
            of_main = torch.empty_like(parameter)
            cuda.main.run(of_main.detach().copy_, parameter.grad)
            parameter.grad = of_main
            use_again(cuda.main, of_main)
            state = optimizer.state[parameter]["momentum_buffer"]
            hosted = [state, of_main] if number % 2 else [state]  # some gradients, too
            ranges = host_ranges.HostRanges(sorted((each.data_ptr(), each.data_ptr() + each.nbytes) for each in hosted))
            updates.run([(of_main, cuda.main)], functools.partial(update, optimizer, group, parameter, ranges))
            del of_main
            parameter.grad = None
        updates.close()
        for parameter in group["params"]:  # as the next forward reads
            copy = torch.empty_like(parameter)
            cuda.main.run(copy.copy_, parameter.detach())
            read.append(copy)
        Stream.drain()

    monkeypatch.setattr(step_copies, "make_lanes", make_lanes)
    return step


def is_right_beside(seed, monkeypatch):
    parameters, states = train(lambda optimizer: optimizer.step())
    cuda, read, evicted = Cuda(monkeypatch, random.Random(seed)), [], []
    found, of_pieces = train(backward_beside(cuda, monkeypatch, read, evicted))
    assert evicted
    if not all((copy == 5).all() for copy in evicted):
        return False
    pairs = [(found, parameters), (of_pieces, states), (read[-len(parameters) :], parameters)]
    return all(all(map(torch.equal, ours, theirs)) for ours, theirs in pairs)


@pytest.mark.parametrize("seed", range(15))
def test_updates_beside_a_backward_are_right_in_any_order(seed, monkeypatch):
    assert is_right_beside(seed, monkeypatch)


@pytest.mark.parametrize("forgotten", ["gradients", "copies", "memory", "end", "out"])
def test_a_wait_beside_a_backward_that_is_missing_shows(forgotten, monkeypatch):
    """Ours for gradients, copies for those on the host, main for memory of gradients, and for what is computed."""
    waits = {"wait_stream": Stream.wait_stream, "wait_event": Stream.wait_event}

    def forget(name, is_it):
        def wait(stream, other):
            names = {each: number for number, each in enumerate(Stream.every)}  # main, copies in, and out, ours
            if not is_it(names[stream], names.get(other)):
                waits[name](stream, other)

        monkeypatch.setattr(Stream, name, wait)

    if forgotten == "memory":
        forget("wait_event", lambda stream, _: stream == 0)
    else:
        missing = {"gradients": (3, 0), "copies": (1, 0), "end": (0, 3), "out": (3, 2)}[forgotten]
        forget("wait_stream", lambda stream, other: (stream, other) == missing)
    assert not all(is_right_beside(seed, monkeypatch) for seed in range(10))
