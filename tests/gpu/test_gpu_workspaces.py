"""Memory that torch keeps for itself must not leave with a tag (workspaces.py explains how it could)."""

from collections.abc import Callable

import pytest

SPLIT_K = """
def check(dtype, tolerance, use_addmm):
    a = torch.randn(64, 262144, device="cuda", dtype=dtype)
    b = torch.randn(262144, 64, device="cuda", dtype=dtype)
    bias = torch.randn(64, device="cuda", dtype=dtype)
    got = torch.addmm(bias, a, b) if use_addmm else a @ b
    want = a.double() @ b.double() + (bias.double() if use_addmm else 0)
    error = ((got.double() - want).norm() / want.norm()).item()
    assert error < tolerance, (dtype, use_addmm, error)
def check_all():
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 1e-2)):
        for use_addmm in (False, True):
            check(dtype, tolerance, use_addmm)
    torch.cuda.synchronize()
"""


@pytest.mark.parametrize("first", ["x @ x", "torch.addmm(x[0], x, x)", "torch.nn.functional.linear(x, x, x[0])"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_first_matmul_inside_a_region_then_split_k_outside(program: Callable[..., str], first: str, dtype: str) -> None:
    program(
        SPLIT_K
        + f"""
with saver.region("tenant"):
    x = torch.randn(2048, 2048, device="cuda", dtype=torch.{dtype})
    y = {first}
torch.cuda.synchronize()
saver.pause("tenant")
check_all()
saver.resume("tenant")
check_all()
assert torch.isfinite(y).all()
"""
    )


def test_matmuls_on_side_streams_and_in_backward(program: Callable[..., str]) -> None:
    program(
        SPLIT_K
        + """
stream = torch.cuda.Stream()
with saver.region("tenant", threads="all"):
    layer = torch.nn.Linear(1024, 1024, device="cuda")
    with torch.cuda.stream(stream):
        layer(torch.randn(512, 1024, device="cuda")).sum().backward()
    stream.synchronize()
saver.pause("tenant")
with torch.cuda.stream(stream):
    check_all()
other = torch.nn.Linear(1024, 1024, device="cuda")
other(torch.randn(512, 1024, device="cuda")).sum().backward()
check_all()
saver.resume("tenant")
assert torch.isfinite(layer.weight.grad).all()
"""
    )
