"""Use by other libraries and processes of a region's tensors, or of tensors that are adopted."""

import importlib.util
from collections.abc import Callable

import pytest

CUPY = pytest.mark.expected_skip("cupy is only needed here")


def need(module: str) -> None:
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")


LENT = """
t = torch.arange(1 << 20, device="cuda", dtype=torch.float32)
other = torch.ones(1 << 20, device="cuda")
address = t.data_ptr()
partner = LEND(t)
result = saver.adopt([t, other], tag="a")
assert result.storages == 1 and sum(result.skipped.values()) == 1, result
assert t.data_ptr() == address and "force=True" in str(result)
torch.cuda.empty_cache()
hog = torch.full((64 * MIB,), 7, dtype=torch.uint8, device="cuda")
saver.pause("a"); saver.resume("a")
partner[5] = 3
torch.cuda.synchronize()
assert float(t[5]) == 3 and float(partner[9]) == 9
del partner
import gc; gc.collect()
assert saver.adopt(t, tag="a").storages == 1 and t.data_ptr() != address
saver.pause("a"); saver.resume("a")
assert float(t[9]) == 9 and float(t[5]) == 3
"""


def test_a_partner_of_dlpack(program: Callable[..., str]) -> None:
    program(LENT.replace("LEND", "torch.from_dlpack"))


@CUPY
@pytest.mark.parametrize("lend", ["cupy.asarray", "cupy.from_dlpack", "(lambda t: cupy.asarray(t[:]))"])
@pytest.mark.parametrize("is_in_use", [False, True])
def test_a_partner_in_cupy(program: Callable[..., str], lend: str, is_in_use: bool) -> None:
    """Before the first region, ebbtide does not record reads of an address. It finds the object that refers to the
    tensor."""
    need("cupy")
    first = "with saver.region('first'): pass\n" if is_in_use else ""
    # A tensor whose own interface was read keeps its place as long as it lives, so a view of it is lent.
    lent = lend if lend != "cupy.asarray" else "(lambda t: cupy.asarray(t.detach()))"
    program("import cupy\n" + first + LENT.replace("LEND", lent))


def test_a_model_after_training(program: Callable[..., str]) -> None:
    program(
        """
from torch.nn.parallel import DistributedDataParallel as DDP
import tempfile
torch.distributed.init_process_group("gloo", init_method=f"file://{tempfile.mkdtemp()}/store", rank=0, world_size=1)
for wrap in (lambda m: m, DDP, lambda m: DDP(m, gradient_as_bucket_view=True)):
    for options in ({"fused": True}, {"foreach": True}):
        parts = torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 64)
        model = wrap(torch.nn.Sequential(*parts).cuda())
        optimizer = torch.optim.AdamW(model.parameters(), **options)
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(torch.randn(8, 64, device="cuda")).square().mean()
            loss.backward()
            optimizer.step()
        kept = model(torch.randn(8, 64, device="cuda"))
        result = saver.adopt(model, optimizer, tag="job")
        assert not [reason for reason in result.skipped if not reason.startswith("on cpu")], str(result)
        saver.pause("job"); saver.resume("job")
        kept.sum().backward()
"""
    )


def test_a_regions_tensor_is_not_sent_to_another_process(program: Callable[..., str]) -> None:
    program(
        """
import io, pickle, torch.multiprocessing
from multiprocessing.reduction import ForkingPickler
def send(thing): ForkingPickler(io.BytesIO(), pickle.HIGHEST_PROTOCOL).dump(thing)
with saver.region("weights"):
    t = torch.ones(1 << 20, device="cuda")
for paused in (False, True):
    if paused: saver.pause("weights")
    try:
        send(t[1:])
        raise SystemExit("sent")
    except ebbtide.StateError as error:
        assert "'weights'" in str(error) and "saver.disabled" in str(error), error
saver.resume("weights")
with saver.region("weights"), saver.disabled():
    copy = t.clone()
send(copy)
"""
    )


def test_checked_reads(program: Callable[..., str]) -> None:
    program(
        """
import copy, io, pickle
from ebbtide.saver.check import ops as check
with saver.region("weights"):
    t = torch.ones(8, device="cuda")
saver.pause("weights")
reads = [repr, str, lambda t: t.tolist(), lambda t: t.cpu(), pickle.dumps, copy.deepcopy, torch.from_dlpack,
         lambda t: torch.save(t, io.BytesIO()), lambda t: t.__cuda_array_interface__, lambda t: t.__dlpack__()]
check.enable()
for number, read in enumerate(reads):
    try:
        read(t)
        raise SystemExit(f"read {number}")
    except ebbtide.StateError as error:
        assert "'weights'" in str(error)
saver.resume("weights")
for read in reads:
    read(t)
"""
    )
