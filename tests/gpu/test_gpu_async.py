"""resume(wait=False) while bytes are really on their way and kernels run.

Each program ends or is killed: a stream that waits for ever shows as a timeout.
"""

from collections.abc import Callable

import pytest

TIMEOUT = 120

SETUP = """
def noise(mib):
    return torch.randint(0, 256, (mib * MIB,), dtype=torch.uint8, device="cuda")
def make(*sizes, tag="weights", **options):
    with saver.region(tag, **options):
        return [noise(mib) for mib in sizes]
def copies(tensors):
    kept = [tensor.clone() for tensor in tensors]
    torch.cuda.synchronize()
    return kept
def compare(tensors, want):  # queued on the current stream; asks nothing of the host
    return [(tensor == other).all() for tensor, other in zip(tensors, want)]
def all_right(answers):
    return all(answer.item() for answer in answers)
"""


def test_what_the_current_stream_does_next_finds_the_bytes(program: Callable[..., str]) -> None:
    program(
        SETUP
        + """
tensors = make(512, 3, 256, 1, 700)
want = copies(tensors)
side = torch.cuda.Stream()
for stream in (torch.cuda.current_stream(), side, side):
    saver.pause("weights")
    with torch.cuda.stream(stream):
        going = saver.resume("weights", wait=False)
        right = compare(tensors, want)
        assert all_right(right)
    assert going.wait().by_tag == {"weights": going.wait().bytes}
    assert going.done and not saver.is_paused("weights")
# Dropped at once, and as a context manager; also where an error comes out of it.
for _ in range(2):
    saver.pause("weights")
    saver.resume("weights", wait=False)
    assert all_right(compare(tensors, want))
saver.pause("weights")
with saver.resume("weights", wait=False, hold_stream=False) as going:
    pass
assert going.done and all_right(compare(tensors, want))
saver.pause("weights")
try:
    with saver.resume("weights", wait=False, hold_stream=False) as going:
        raise KeyError("mine")
except KeyError:
    pass
assert going.done and all_right(compare(tensors, want))
# Bytes written next are not overwritten by bytes that come late.
saver.pause("weights")
saver.resume("weights", wait=False)
for tensor in tensors:
    tensor.fill_(7)
torch.cuda.synchronize(); saver.pause("weights"); saver.resume("weights")
assert all((tensor == 7).all() for tensor in tensors)
""",
        timeout=TIMEOUT,
    )


def test_side_streams_wait_for_what_they_need(program: Callable[..., str]) -> None:
    program(
        SETUP
        + """
tensors = make(512, 64, 256, 64, 256, 2)
want = copies(tensors)
sides = [torch.cuda.Stream() for _ in range(3)]
for turn, first in enumerate((3, 5, 0)):
    saver.pause("weights")
    named = [tensors[first], tensors[1]]
    going = saver.resume("weights", wait=False, hold_stream=False, order=named)
    going.stream_wait(sides[0], tensors[first])
    with torch.cuda.stream(sides[0]):
        one = compare([tensors[first]], [want[first]])
    going.stream_wait(sides[1], named)
    with torch.cuda.stream(sides[1]):
        some = compare(named, [want[first], want[1]])
    going.stream_wait(sides[2])
    with torch.cuda.stream(sides[2]):
        everything = compare(tensors, want)
        one_more = compare(tensors[-1:], want[-1:])
    for side in sides:
        side.synchronize()
    assert all_right(one) and all_right(some)
    # The words are set before the report is made, so `done` may still be False here; the bytes are there.
    assert all(going.ready(tensor) for tensor in tensors)
    assert all_right(everything) and all_right(one_more)
    going.wait()
    going.stream_wait(sides[0]); going.stream_wait()
# ready() turns true and stays true; then a kernel that is launched may use the bytes.
saver.pause("weights")
going = saver.resume("weights", wait=False, hold_stream=False, order=tensors[2])
was_ready = [False] * len(tensors)
deadline = time.monotonic() + 60
while not all(was_ready):
    assert time.monotonic() < deadline
    now = [going.ready(tensor) for tensor in tensors]
    assert all(later for earlier, later in zip(was_ready, now) if earlier)
    newly = [index for index, is_ready in enumerate(now) if is_ready and not was_ready[index]]
    assert all_right(compare([tensors[index] for index in newly], [want[index] for index in newly]))
    was_ready = now
going.wait()
assert going.done and going.ready(tensors[0]) and going.ready(torch.ones(3, device="cuda"))
# A stream that is destroyed while it waits: it goes at the end of its queued work.
import ctypes
driver = ctypes.CDLL("libcuda.so.1")
for _ in range(3):
    saver.pause("weights")
    going = saver.resume("weights", wait=False, hold_stream=False)
    handle = ctypes.c_void_p()
    assert driver.cuStreamCreate(ctypes.byref(handle), 1) == 0
    stream = torch.cuda.ExternalStream(handle.value, device=torch.device("cuda", 0))
    going.stream_wait(stream)
    going.stream_wait(stream, tensors[1])
    assert driver.cuStreamDestroy_v2(handle) == 0
    del stream
    going.wait()
    assert all_right(compare(tensors, want))
torch.cuda.synchronize()
""",
        timeout=TIMEOUT,
    )


def test_waiting_streams_never_hold_up_the_bytes(program: Callable[..., str]) -> None:
    """More waiting streams than the hardware has queues, the first launch of the kernel that fills, and memory that is
    unpinned at the end of a resume. Each of these could wait for a stream that in turn waits for it."""
    program(
        SETUP
        + """
made = {}
for backup in ("ram", "pinned", "disk"):
    tag = f"tag-{backup}"
    made[tag] = make(40, 3, 70, tag=tag, backup=backup)
    with saver.region(tag, backup=backup):
        made[tag] += [torch.full((32 * MIB,), 3.0, device="cuda")]
with saver.region("none", backup=None):
    made["none"] = [torch.ones(64 * MIB, device="cuda")]
want = {tag: copies(tensors) for tag, tensors in made.items()}
want["none"] = [torch.zeros_like(made["none"][0])]
sides = [torch.cuda.Stream(priority=priority) for priority in (0, -1) for _ in range(32)]
for retain in (False, None, True, False):
    for tag in made:
        print(tag, retain, flush=True)
        saver.pause(tag)
        going = saver.resume(tag, wait=False, retain=retain)
        answers = compare(made[tag], want[tag])
        for side in sides:
            going.stream_wait(side)
            with torch.cuda.stream(side):
                answers += compare(made[tag][-1:], want[tag][-1:])
        going.wait()
        torch.cuda.synchronize()
        assert all_right(answers), (tag, retain)
# Several under way at once: more engines than are kept.
saver.pause()
going = [saver.resume(tag, wait=False, retain=False) for tag in made]
assert all(all_right(compare(made[tag], want[tag])) for tag in made)
for one in going:
    one.wait()
""",
        timeout=TIMEOUT,
    )


def test_calls_that_wait_for_the_device_inside_the_driver_come_back(program: Callable[..., str]) -> None:
    """The first launch of a kernel, which loads it, and functions that free device memory. Each holds the driver while
    it waits for a stream that waits for the bytes."""
    program(
        SETUP
        + """
tensors = make(700, 3, 600)
want = copies(tensors)
x = torch.linspace(0.1, 0.9, 1 << 16, device="cuda")
first_launches = [
    torch.special.bessel_j0, torch.special.bessel_j1, torch.special.i0e, torch.special.erfcx, torch.special.log_ndtr,
    torch.special.airy_ai, torch.lgamma, torch.digamma, torch.erfinv, torch.sinc,
]
for first_launch in first_launches:
    cached = torch.empty(64 * MIB, device="cuda")
    saver.pause("weights")
    going = saver.resume("weights", wait=False)
    got = first_launch(x)
    del cached
    torch.cuda.empty_cache()  # cudaFree
    fresh = torch.empty(96 * MIB, dtype=torch.uint8, device="cuda")
    right = compare(tensors, want)
    going.wait()
    torch.cuda.synchronize()
    assert all_right(right) and got.isfinite().all()
    del fresh
""",
        timeout=TIMEOUT,
    )


def test_attach_gives_the_same_output_and_takes_its_hooks_away(program: Callable[..., str]) -> None:
    program(
        """
torch.manual_seed(0)
with saver.region("model"):
    layer = torch.nn.TransformerEncoderLayer(1024, 8, 4096, dropout=0.0, batch_first=True)
    model = torch.nn.Sequential(
        torch.nn.Embedding(32000, 1024), torch.nn.TransformerEncoder(layer, 8), torch.nn.Linear(1024, 32000)
    ).cuda()
tokens = torch.randint(0, 32000, (4, 64), device="cuda")
hooks = lambda: sum(len(part._forward_pre_hooks) for part in model.modules())
state = {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}
def is_right(got):  # hooks keep torch from its fused path, which rounds otherwise
    return torch.allclose(got, want, rtol=1e-3, atol=1e-3)
with torch.no_grad():
    want = model.eval()(tokens)
    for turn in range(4):
        model.train(turn % 2 == 1)  # without dropout; other paths through torch's layers
        saver.pause("model")
        going = saver.resume("model", wait=False, hold_stream=False, order=model)
        attachment = going.attach(model)
        got = model(tokens)
        torch.cuda.synchronize()
        assert is_right(got), (turn, (got - want).abs().max())
        going.wait()
        if turn == 1:
            attachment.remove()
            assert hooks() == 0
        assert is_right(model(tokens))
        assert hooks() == 0  # the first forward after the end took them out
    assert all(torch.equal(tensor.cpu(), state[name]) for name, tensor in model.state_dict().items())
    saver.pause("model")
    going = saver.resume("model", wait=False, hold_stream=False)
    going.attach(model)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # each forward waits on the stream that it runs on
        got = model(tokens)
    side.synchronize()
    assert is_right(got)
""",
        timeout=TIMEOUT,
    )


def test_a_pause_or_a_swap_that_comes_meanwhile_waits(program: Callable[..., str]) -> None:
    program(
        SETUP
        + """
tensors, others = make(512, 256, 64), make(256, 64, tag="others")
want, want_others = copies(tensors), copies(others)
for hold_stream in (True, False):
    size = saver.pause("weights").bytes
    going = saver.resume("weights", wait=False, hold_stream=hold_stream)
    assert saver.pause("weights").bytes == size
    assert going.done and going.wait().bytes == size and saver.is_paused("weights")
    saver.resume("weights")
    assert all_right(compare(tensors, want))
    saver.pause("others")
    saver.pause("weights")
    going = saver.resume("weights", wait=False, hold_stream=hold_stream)
    saver.swap(pause="weights", resume="others")
    assert going.done and saver.is_paused("weights")
    assert all_right(compare(others, want_others))
    going = saver.resume("weights", wait=False, hold_stream=hold_stream)
    saver.pause("others")  # another tag's
    saver.resume("others")
    assert all_right(compare(others, want_others))
    going.wait()
    assert all_right(compare(tensors, want))
# A thread that pauses meanwhile, while another's stream waits.
saver.pause("weights")
going = saver.resume("weights", wait=False)
thread = threading.Thread(target=saver.pause, args=("weights",)); thread.start()
thread.join(60)
assert not thread.is_alive() and saver.is_paused("weights")
saver.resume()
assert all_right(compare(tensors, want))
""",
        timeout=TIMEOUT,
    )


def test_a_captured_graph_replays_right_after_it(program: Callable[..., str]) -> None:
    program(
        SETUP
        + """
with saver.region("weights"):
    layers = torch.nn.Sequential(*[torch.nn.Linear(4096, 4096) for _ in range(4)]).cuda()
    static = torch.randn(32, 4096, device="cuda")
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side), torch.no_grad():
    layers(static)
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.no_grad(), saver.cuda_graph(graph, tag="graphs"):
    out = layers(static).relu() + 1
graph.replay(); torch.cuda.synchronize()
want = out.clone()
for hold_stream in (True, False):
    saver.pause("weights", "graphs")
    going = saver.resume("weights", "graphs", wait=False, hold_stream=hold_stream)
    if not hold_stream:
        going.stream_wait()
    graph.replay()
    got = out.clone()
    assert torch.equal(got, want), (got - want).abs().max()
    going.wait()
# A capture that begins meanwhile comes out whole.
x = torch.ones(1 << 20, device="cuda")
saver.pause("weights")
going = saver.resume("weights", wait=False, hold_stream=False)
second = torch.cuda.CUDAGraph()
with torch.cuda.graph(second):
    y = x + 1
going.wait()
second.replay(); torch.cuda.synchronize()
assert (y == 2).all()
graph.replay()
assert torch.equal(out, want)
""",
        timeout=TIMEOUT,
    )


ENDINGS = {
    "nothing waits": "going = saver.resume('weights', wait=False, hold_stream=False)",
    "streams wait and it is dropped": "saver.resume('weights', wait=False).stream_wait(side); tensors[0].add_(1)",
    "sys.exit inside it": "\n".join(
        ["with saver.resume('weights', wait=False, hold_stream=False):", "    saver.pause('weights'); sys.exit(0)"]
    ),
}


@pytest.mark.parametrize("ending", ENDINGS.values(), ids=ENDINGS.keys())
def test_exit_status_is_0_while_one_is_under_way(program: Callable[..., str], ending: str) -> None:
    program(
        SETUP
        + """
tensors = make(1024, 1024, 64)
side = torch.cuda.Stream()
torch.cuda.synchronize(); saver.pause("weights")
"""
        + ending,
        timeout=TIMEOUT,
    )
