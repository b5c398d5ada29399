"""Regions whose memory would get another tag than one expects: tasks, generators, and policies that differ."""

import asyncio
import gc
import warnings

import pytest

torch = pytest.importorskip("torch")

from ebbtide import _core  # noqa: E402
from ebbtide.errors import StateError  # noqa: E402
from ebbtide.saver.reclaim import torch_cache  # noqa: E402
from ebbtide.saver.regions.region import Tagged, separate_memory  # noqa: E402
from test_saver_captures import make_graph_class  # noqa: E402


def tag_of(tensor):
    info = _core.find(tensor.data_ptr())
    return None if info is None else info.tag


def test_a_task_cannot_enter_a_region_while_another_one_awaits_in_one(saver, tag, tag2):
    async def make(name, inner=None):
        with saver.region(name):
            first = torch.ones(10, device=saver.device)
            await asyncio.sleep(0)
            with saver.region(inner or name), saver.disabled(), saver.region(name):
                await asyncio.sleep(0)
            return first, torch.ones(10, device=saver.device)

    async def both(second):
        return await asyncio.gather(make(tag, tag2), second, return_exceptions=True)

    async def leave():
        with saver.disabled():
            await asyncio.sleep(0)

    for second, name in ((make(tag2), f"region '{tag2}'"), (leave(), r"disabled\(\)")):
        made, refused = asyncio.run(both(second))
        assert [tag_of(each) for each in made] == [tag, tag], "nothing of it went elsewhere"
        with pytest.raises(StateError, match=f"is inside region '{tag}' and awaits there.*{name} would take over"):
            raise refused
    with saver.region(tag2):  # of no task
        made = asyncio.run(make(tag))
        assert [tag_of(each) for each in made] == [tag, tag]
        assert tag_of(torch.ones(10, device=saver.device)) == tag2
    assert saver.tags()[tag].lease_count == saver.tags()[tag2].lease_count == 0


def test_an_abandoned_task_leaves_its_region(saver, tag):
    async def wait():
        with saver.region(tag):
            await asyncio.Event().wait()

    loop = asyncio.new_event_loop()
    task = loop.create_task(wait())
    loop.run_until_complete(asyncio.sleep(0))
    assert saver.tags()[tag].lease_count == 1
    loop.close()
    del task, loop
    gc.collect()
    assert saver.tags()[tag].lease_count == 0


def test_a_region_that_ends_before_one_inside_it_warns(saver, tag, tag2):
    def wait_inside():
        with saver.region(tag2):
            yield

    waiting = wait_inside()
    with pytest.warns(RuntimeWarning, match=f"region '{tag}' ends before region '{tag2}', which was entered inside it"):
        with saver.region(tag):
            next(waiting)
    waiting.close()
    other = wait_inside()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        next(other)
        with saver.region(tag):
            pass
        other.close()
        with saver.region(tag):  # that the inner one ends first is as it should be, however it ends
            inner = wait_inside()
            next(inner)
            inner.close()
            with pytest.raises(ValueError), saver.region(tag2):
                raise ValueError
    assert saver.tags()[tag].lease_count == saver.tags()[tag2].lease_count == 0


def test_a_plain_region_of_a_tag_with_another_policy_warns_once(saver, tag, tag2):
    region = saver.region(tag, backup="disk", retain=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for again in (
            region,
            saver.region(tag, backup=None),
            saver.region(tag2),
            saver.region(tag2, backup=None),
            region,
        ):
            with again:
                pass
        with saver.region(tag2):
            pass
    with pytest.warns(RuntimeWarning, match="an earlier region of the tag has backup=None: a policy belongs") as found:
        with saver.region(tag):
            pass
    assert found[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with saver.region(tag):
            pass


def test_what_ebbtide_opens_itself_inside_a_region_belongs_to_the_same_task(saver, tag, tag2):
    """Cells of a notebook run in a task: captures in a region, and the emptying of torch's cache in a pause."""

    async def cell():
        with saver.region(tag):
            graph = make_graph_class()()
            graph.capture_begin()
            graph.capture_end()
            torch_cache.empty()
            with separate_memory(), Tagged(tag2, 1):
                pass
            return torch.ones(10, device=saver.device)

    assert tag_of(asyncio.run(cell())) == tag
