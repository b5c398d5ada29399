"""EBBTIDE_CHECK=1: a pause warns of gradients and optimizer states that it leaves on the device."""

import gc
import threading
import warnings
import weakref

import pytest

torch = pytest.importorskip("torch")

from ebbtide import _core  # noqa: E402
from ebbtide.saver.check import enabling, optimizers  # noqa: E402
from outside_model import WIDTH, backward, make_model, trained  # noqa: E402

pytestmark = pytest.mark.usefixtures("quick_scans")

MIB = 1 << 20


@pytest.fixture
def check(saver, monkeypatch):
    """As in a process with EBBTIDE_CHECK=1, but for the check of ops."""
    monkeypatch.setattr(optimizers, "_known", {})
    monkeypatch.setattr(optimizers, "_warned", set())
    monkeypatch.setattr(optimizers, "_handle", None)
    monkeypatch.setattr(enabling, "_look_before_pause", optimizers.warn_of_outside)
    optimizers.watch()
    yield
    optimizers._handle.remove()


def warned_by(act):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        act()
    return [each for each in caught if "the pause of" in str(each.message)]


def test_a_pause_warns_once_and_says_what_to_do(check, saver, tag):
    model, optimizer = trained(saver, tag)
    (caught,) = warned_by(lambda: saver.pause(tag))
    text = str(caught.message)
    assert caught.category is RuntimeWarning and caught.filename == __file__
    assert f"the pause of {tag!r} leaves 1.0 MiB of gradients, 2.0 MiB of optimizer states on the device" in text
    assert "AdamW has its parameters in this tag" in text and f"saver.region({tag!r})" in text
    assert f"saver.adopt(optimizer, tag={tag!r})" in text and "saver.outside(model, optimizer)" in text
    saver.resume(tag)
    assert warned_by(lambda: saver.pause(tag)) == []
    del model, optimizer


def test_following_the_advice_ends_it(check, saver, tag):
    model, optimizer = trained(saver, tag)
    saver.adopt(optimizer, tag=tag)
    assert warned_by(lambda: saver.pause(tag)) == []
    saver.resume(tag)
    assert not saver.outside(model, optimizer)


def test_without_gradients_the_text_is_about_the_step(check, saver, tag):
    _model, optimizer = trained(saver, tag)
    optimizer.zero_grad()
    (caught,) = warned_by(lambda: saver.pause(tag))
    text = str(caught.message)
    assert "leaves 2.0 MiB of optimizer states on the device" in text and "backward" not in text


@pytest.mark.parametrize("way", ["pause", "every tag", "dict", "paused", "swap"])
def test_every_way_to_pause_warns(check, saver, tag, tag2, way):
    with saver.region(tag2):
        other = torch.zeros(MIB, device=saver.device)
    _keep = trained(saver, tag)
    saver.pause(tag2)

    def act():
        if way == "paused":
            with saver.paused(tag):
                pass
        elif way == "swap":
            saver.swap(pause=tag, resume=tag2)
        else:
            saver.pause(*{"pause": [tag], "every tag": [], "dict": [{tag: "ram"}]}[way])

    (caught,) = warned_by(act)
    assert caught.filename == __file__ and repr(tag) in str(caught.message)
    del other


def test_as_an_error_it_comes_before_anything_moves(check, saver, tag):
    _keep = trained(saver, tag)
    calls = []
    stop = [
        saver.on(event, tag, lambda _, event=event: calls.append(event)) for event in ("before_pause", "after_resume")
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="the pause of"), saver.paused(tag):
            pytest.fail("entered")
    assert not saver.is_paused(tag) and calls == ["before_pause", "after_resume"]
    saver.pause(tag)
    assert saver.is_paused(tag)
    for remove in stop:
        remove()


def test_a_tag_of_its_own_is_no_mistake(check, saver, tag, tag2):
    with saver.region(tag):
        model = make_model(saver)
    optimizer = torch.optim.AdamW(model.parameters())
    backward(saver, model)
    with saver.region(tag2):
        optimizer.step()
    optimizer.zero_grad()
    assert warned_by(lambda: saver.pause(tag)) == []


def test_other_tags_and_the_dead_are_left_alone(check, saver, tag, tag2):
    with saver.region(tag2):
        other = torch.zeros(MIB, device=saver.device)
    model, optimizer = trained(saver, tag)
    assert warned_by(lambda: saver.pause(tag2)) == []
    ordinary = make_model(saver)
    other_optimizer = torch.optim.AdamW(ordinary.parameters())
    backward(saver, ordinary)
    other_optimizer.step()
    assert len(optimizers._living()) == 2
    gone = weakref.ref(optimizer)
    del model, optimizer
    gc.collect(0)
    assert gone() is None, "the check keeps nothing alive"
    assert optimizers._living() == [other_optimizer] and len(optimizers._known) == 1
    assert warned_by(lambda: saver.pause(tag)) == []
    del other


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (torch.optim.AdamW, {"foreach": True}),
        (torch.optim.AdamW, {"foreach": False}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.SGD, {"momentum": 0.9, "lr": 0.1}),
        (torch.optim.LBFGS, {"max_iter": 1}),
    ],
)
def test_the_optimizers_of_torch_are_known(check, saver, tag, make, options):
    if make is not torch.optim.LBFGS:
        _model, optimizer = trained(saver, tag, make, **options)
    else:
        with saver.region(tag):
            _model = make_model(saver)
        optimizer = make(_model.parameters(), **options)

        def closure():
            optimizer.zero_grad()
            loss = _model(torch.ones(2, WIDTH, device=saver.device)).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)
    (caught,) = warned_by(lambda: saver.pause(tag))
    assert "of optimizer states" in str(caught.message) and make.__name__ in str(caught.message)


def test_sgd_without_states_has_gradients(check, saver, tag):
    _keep = trained(saver, tag, torch.optim.SGD, lr=0.1)
    (caught,) = warned_by(lambda: saver.pause(tag))
    assert "leaves 1.0 MiB of gradients on the device" in str(caught.message)


def test_sparse_gradients_and_states_are_weighed(check, saver, tag):
    with saver.region(tag):
        table = torch.nn.Embedding(WIDTH, WIDTH, sparse=True).to(saver.device)
    optimizer = torch.optim.SparseAdam(table.parameters())
    table(torch.arange(WIDTH, device=saver.device)).sum().backward()
    optimizer.step()
    (caught,) = warned_by(lambda: saver.pause(tag))
    assert "1.0 MiB of gradients, 2.0 MiB of optimizer states" in str(caught.message)


def test_an_optimizer_that_steps_in_another_thread_is_known(check, saver, tag):
    made = []
    thread = threading.Thread(target=lambda: made.append(trained(saver, tag)))
    thread.start()
    thread.join()
    assert len(warned_by(lambda: saver.pause(tag))) == 1


def test_pauses_while_other_threads_step(check, saver, tag):
    """Optimizers come and go, and make states, while a tag is looked at."""
    stop, errors = threading.Event(), []

    def work():
        try:
            while not stop.is_set():
                weight = torch.nn.Parameter(torch.ones(8, device=saver.device))
                optimizer = torch.optim.Adam([weight])
                weight.grad = torch.ones_like(weight)
                optimizer.step()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    model, optimizer = trained(saver, tag)
    try:
        assert len(warned_by(lambda: saver.pause(tag))) == 1
        for _ in range(20):
            optimizers._warned.clear()
            optimizers.warn_of_outside([f"{tag}-none"])
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert errors == []
    del model, optimizer


def test_a_wrapper_with_states_of_another_form_is_passed(check, saver, tag):
    """An optimizer of another library, whose states are no dicts, or belong to no parameter."""

    class Foreign(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {})

        def step(self, closure=None):
            self.state["whole"] = torch.zeros(WIDTH, WIDTH, device=saver.device)
            self.state[self.param_groups[0]["params"][0]] = [torch.zeros(WIDTH, WIDTH, device=saver.device), None, 3]

    _keep = trained(saver, tag, Foreign)
    (caught,) = warned_by(lambda: saver.pause(tag))
    assert "1.0 MiB of gradients, 1.0 MiB of optimizer states" in str(caught.message)


def test_nothing_is_watched_where_nobody_checks(run_python):
    code = """
    import sys, torch
    from ebbtide import saver
    from torch.optim import optimizer as names
    with saver.region("weights"):
        model = torch.nn.Linear(64, 64, device=saver.device)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 64, device=saver.device)).sum().backward()
    optimizer.step()
    saver.pause("weights")
    print("ebbtide.saver.check.optimizers" in sys.modules, len(names._global_optimizer_post_hooks))
    """
    off = run_python(code, trains=True, EBBTIDE_CHECK=None)
    assert (off.stdout, off.stderr.count("the pause of")) == ("False 0\n", 0)
    on = run_python(code, trains=True, EBBTIDE_CHECK="1")
    assert (on.stdout, on.stderr.count("the pause of 'weights' leaves")) == ("True 1\n", 1), on.stderr


def test_a_forked_child_of_a_checked_process_goes_on(run_python):
    code = """
    import os, torch
    from ebbtide import saver
    with saver.region("weights"):
        model = torch.nn.Linear(64, 64, device=saver.device)
    optimizer = torch.optim.AdamW(model.parameters())
    child = os.fork()
    if child == 0:
        own = torch.nn.Linear(4, 4)
        steps = torch.optim.SGD(own.parameters(), momentum=0.9)  # AdamW asks CUDA, which no child of a fork can
        own(torch.ones(1, 4)).sum().backward()
        steps.step()
        os._exit(0)
    print(os.waitpid(child, 0)[1])
    """
    done = run_python(code, trains=True, EBBTIDE_CHECK="1")
    assert done.stdout == "0\n", done.stderr


def test_the_watched_states_of_large_model_support_do_not_warn(check, lms, saver, tag):
    lms.enable(limit="1GiB")
    with saver.region(tag):
        model = make_model(saver)
    optimizer = torch.optim.AdamW(model.parameters())
    backward(saver, model)
    optimizer.step()
    assert not saver.outside(list(optimizer.state[model.weight].values()))
    optimizer.zero_grad()
    assert warned_by(lambda: saver.pause(tag)) == []
    assert _core.query_tag("lms.optimizer") is not None
