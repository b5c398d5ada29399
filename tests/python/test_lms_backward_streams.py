"""`step_in_backward` on a model of CUDA's streams, with gradients that torch's autograd makes in several of them."""

import random
from collections import defaultdict

import pytest

torch = pytest.importorskip("torch")

from cuda_streams import Cuda, Stream  # noqa: E402
from ebbtide import lms  # noqa: E402
from ebbtide.lms.streaming import backward_steps, host_ranges, optimizer_step, step_copies  # noqa: E402
from ebbtide.saver.regions import startup  # noqa: E402

SIZE = 1000


class Use(torch.autograd.Function):
    """Its backward makes the gradient of a parameter, all of whose elements are `value`, in a stream."""

    @staticmethod
    def forward(ctx, given, parameter, cuda, stream, value):
        ctx.made = cuda, stream, value
        return given.clone()

    @staticmethod
    def backward(ctx, gradient):
        cuda, stream, value = ctx.made
        cuda.current = stream  # as torch's engine has it
        made = torch.full((SIZE,), 55.0)  # old bytes
        for _ in range(10):
            stream.run(int)
        stream.run(made.detach().fill_, value)
        return gradient, made, None, None, None


def queue_steps(cuda, monkeypatch):
    """A step is a kernel in the current stream. torch's, with the gradients that there are as it is queued."""
    plain = torch.optim.SGD.step

    def step(optimizer):
        seen, states = [], defaultdict(dict)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                seen.append(parameter.detach())
                seen[-1].grad, states[seen[-1]] = parameter.grad.detach(), optimizer.state[parameter]
        cuda.current.run(plain, optimizer_step.view_of(optimizer, optimizer.param_groups[0], seen, states))

    monkeypatch.setattr(optimizer_step, "inner_step", lambda owner: step)


def train(monkeypatch, seed, part_bytes, fails=False):
    """Two parameters, what the streams of their gradients read after the backward, and what the caller's reads."""
    startup.backend()  # without one there are no states on the host
    cuda = Cuda(monkeypatch, random.Random(seed))
    monkeypatch.setattr(step_copies, "has_streams", lambda device: True)
    monkeypatch.setattr(host_ranges.HostRanges, "are_any", staticmethod(lambda: True))
    monkeypatch.setattr(backward_steps, "_PART_BYTES", part_bytes)
    queue_steps(cuda, monkeypatch)
    caller, *streams = cuda.main, Stream(), Stream()
    parameters = [torch.nn.Parameter(torch.zeros(SIZE)) for _ in streams]
    optimizer = torch.optim.SGD(parameters, 1.0, momentum=0.9)
    for parameter in parameters:
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros(SIZE)
    handle = lms.step_in_backward(optimizer)
    hidden = given = torch.ones(1, requires_grad=True)
    for number, (parameter, stream) in enumerate(zip(parameters, streams, strict=True), 1):
        hidden = Use.apply(hidden, parameter, cuda, stream, number)

    def begin(gradient):  # the end of a backward is in the caller's stream
        torch.autograd.Variable._execution_engine.queue_callback(lambda: setattr(cuda, "current", caller))

    def fail(gradient):
        raise ArithmeticError

    hidden.register_hook(begin)
    if fails:
        given.register_hook(fail)
    try:
        hidden.sum().backward()
    except ArithmeticError:
        assert fails
    cuda.current = caller
    reads = []
    for stream in (caller, *streams):
        for parameter in parameters:
            reads.append(torch.full((SIZE,), 99.0))
            stream.run(reads[-1].copy_, parameter.detach())
    Stream.drain()
    handle.remove()
    return [each[0].item() for each in parameters], [each[0].item() for each in reads]


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("parameters_of_part", [1, 2])
def test_gradients_of_several_streams(monkeypatch, seed, parameters_of_part):
    parameters, reads = train(monkeypatch, seed, 4 * SIZE * parameters_of_part)
    assert parameters == [-1, -2]
    assert reads == 3 * [-1, -2], "by the caller's stream, and both that made gradients"


@pytest.mark.parametrize("seed", range(10))
def test_a_backward_that_fails(monkeypatch, seed):
    """The streams that made gradients wait for what was updated by then."""
    parameters, reads = train(monkeypatch, seed, 4 * SIZE, fails=True)
    assert parameters == [0, -2], "the first one has no gradient yet"
    assert reads[2:] == 2 * [0, -2]
