"""Device memory really leaves, other processes can really use it meanwhile, and it really comes back."""

from collections.abc import Callable

import pytest

HOG = """
import subprocess
HOG = '''
import sys, torch
free, total = torch.cuda.mem_get_info()
hog = torch.empty(free - int(sys.argv[1]), dtype=torch.uint8, device="cuda")
print("holding", flush=True)
sys.stdin.readline()
'''
def hog(leave):
    command = [sys.executable, "-c", HOG, str(leave)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline().strip() == "holding"
    return process
def release(process):
    process.stdin.write("\\n"); process.stdin.flush(); process.wait(60)
"""


@pytest.mark.device_memory
def test_pause_frees_device_memory_and_resume_brings_the_bytes_back(program: Callable[..., str]) -> None:
    program(
        """
torch.zeros(1, device="cuda")
start = free()
with saver.region("weights"):
    tensors = [torch.randint(0, 255, (n * MIB,), dtype=torch.uint8, device="cuda") for n in (1, 3, 64, 200, 700)]
with saver.region("kv", backup=None):
    kv = torch.full((300 * MIB,), 7, dtype=torch.uint8, device="cuda")
copies = [t.cpu() for t in tensors]
addresses = [t.data_ptr() for t in tensors]
full = free()
report = saver.pause()
assert report.bytes >= 1200 * MIB
# The driver takes a few MiB of the device for the pinned ring, once.
assert free() - full >= report.bytes - 32 * MIB, (free() - full, report.bytes)
assert abs(start - free()) < 64 * MIB
saver.resume()
assert [t.data_ptr() for t in tensors] == addresses
assert all(torch.equal(t.cpu(), c) for t, c in zip(tensors, copies))
assert not kv.any()  # dropped: zeros, never old bytes
"""
    )


@pytest.mark.device_memory
def test_resume_while_another_process_holds_the_memory(program: Callable[..., str]) -> None:
    program(
        HOG
        + """
with saver.region("weights"):
    w = torch.randint(0, 255, (4096 * MIB,), dtype=torch.uint8, device="cuda")
check = w[:: 1 << 20].cpu()
saver.pause("weights"); torch.cuda.empty_cache()
other = hog(1024 * MIB)
before = free()
try:
    saver.resume("weights")
    raise SystemExit("resumed without memory")
except ebbtide.OutOfMemoryError as error:
    assert isinstance(error, torch.OutOfMemoryError)
    assert error.requested_bytes == 4096 * MIB and error.free_bytes < 4096 * MIB, vars(error)
assert saver.is_paused("weights") and free() == before
started = time.monotonic()
try:
    saver.resume("weights", timeout=2)
    raise SystemExit("resumed without memory")
except ebbtide.OutOfMemoryError:
    assert 1.9 < time.monotonic() - started < 8
threading.Timer(2, release, [other]).start()
saver.resume("weights", timeout=60)
assert torch.equal(w[:: 1 << 20].cpu(), check)
other.wait(60)
"""
    )


@pytest.mark.device_memory
def test_out_of_memory_in_a_region_is_torchs_own_error(program: Callable[..., str]) -> None:
    program(
        """
saver.configure(device_limit="1GiB")
with saver.region("weights"):
    kept = torch.ones(512 * MIB, dtype=torch.uint8, device="cuda")
    try:
        torch.empty(1024 * MIB, dtype=torch.uint8, device="cuda")
        raise SystemExit("no error")
    except torch.OutOfMemoryError:
        pass
    also = torch.ones(256 * MIB, dtype=torch.uint8, device="cuda")
assert kept.all() and also.all()
"""
    )


def test_cached_free_blocks_of_a_paused_tag_are_never_served(program: Callable[..., str]) -> None:
    program(
        """
with saver.region("weights"):
    kept = torch.ones(64 * MIB, dtype=torch.uint8, device="cuda")
    dead = torch.ones(64 * MIB, dtype=torch.uint8, device="cuda")
stale = dead.data_ptr()
del dead
saver.pause("weights")
with saver.region("weights"):
    fresh = [torch.full((64 * MIB,), 3, dtype=torch.uint8, device="cuda") for _ in range(3)]
assert all(t.data_ptr() != stale for t in fresh) and all((t == 3).all() for t in fresh)
saver.resume("weights")
assert kept.all()
"""
    )


def test_gradients_lie_in_their_tag_with_threads_all(program: Callable[..., str]) -> None:
    program(
        """
layer = torch.nn.Linear(2048, 2048, device="cuda")
with saver.region("grads", threads="all"):
    layer(torch.randn(8, 2048, device="cuda")).sum().backward()
info = ebbtide._core.find(layer.weight.grad.data_ptr())
assert info is not None and info.tag == "grads"
before = layer.weight.grad.clone()
saver.pause("grads"); saver.resume("grads")
assert torch.equal(before, layer.weight.grad)
"""
    )


def test_nested_regions_streams_and_record_stream(program: Callable[..., str]) -> None:
    program(
        """
side = torch.cuda.Stream()
with saver.region("outer"):
    a = torch.ones(8 * MIB, device="cuda")
    with saver.region("inner"):
        b = torch.ones(8 * MIB, device="cuda")
        with saver.disabled():
            c = torch.ones(8 * MIB, device="cuda")
    d = torch.ones(8 * MIB, device="cuda")
    with torch.cuda.stream(side):
        e = torch.ones(8 * MIB, device="cuda")
tag_of = lambda t: getattr(ebbtide._core.find(t.data_ptr()), "tag", None)
assert [tag_of(t) for t in (a, b, c, d, e)] == ["outer", "inner", None, "outer", "outer"]
a.record_stream(side)
with torch.cuda.stream(side):
    total = a.sum() + e.sum()
del a
saver.pause("outer"); saver.resume("outer")
assert total.item() == 16 * MIB and d.all()
"""
    )


def test_work_that_is_still_queued_is_waited_for(program: Callable[..., str]) -> None:
    program(
        """
with saver.region("weights"):
    w = torch.zeros(256 * MIB, device="cuda")
side = torch.cuda.Stream()
torch.cuda.synchronize()
with torch.cuda.stream(side):
    torch.cuda._sleep(2_000_000_000)
    w += 1
saver.pause("weights"); saver.resume("weights")
assert (w == 1).all()
"""
    )


@pytest.mark.device_memory
def test_adopt_a_finished_model_and_optimiser(program: Callable[..., str]) -> None:
    program(
        """
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1024)).cuda()
model[2].weight = model[0].weight
view = model[0].weight.view(-1)
optimizer = torch.optim.Adam(model.parameters())
x = torch.randn(64, 1024, device="cuda")
for _ in range(2):
    optimizer.zero_grad(); model(x).square().mean().backward(); optimizer.step()
want = [p.detach().clone() for p in model.parameters()]
saver.adopt(model, optimizer, tag="job")
assert model[2].weight is model[0].weight and view.data_ptr() == model[0].weight.data_ptr()
assert ebbtide._core.find(model[0].weight.data_ptr()).tag == "job"
before = free()
report = saver.pause("job"); assert report.bytes > 16 * MIB
assert free() > before
saver.resume("job")
assert all(torch.equal(a, b) for a, b in zip(want, model.parameters()))
optimizer.zero_grad(); model(x).square().mean().backward(); optimizer.step()
"""
    )
