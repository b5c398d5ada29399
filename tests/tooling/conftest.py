"""Fixtures of the tests of the tools."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture
def saver() -> Iterator[object]:
    """`ebbtide.saver`. After the test all memory is resident."""
    pytest.importorskip("torch")
    from ebbtide import saver as module

    yield module
    gc.collect()
    module.resume()


@pytest.fixture
def tag(request: pytest.FixtureRequest) -> str:
    """Of this test alone."""
    return "".join(letter if letter.isalnum() else "_" for letter in request.node.name)
