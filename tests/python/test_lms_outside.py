"""Large model support: states and weights that it cannot move are named, and a checkpoint can be resumed."""

import gc

import pytest

torch = pytest.importorskip("torch")

from ebbtide import _core, torch_extension  # noqa: E402
from ebbtide.lms import calls  # noqa: E402
from lms_model import SMALL  # noqa: E402
from lms_states import TAG as STATES  # noqa: E402

pytestmark = [pytest.mark.sim_only, pytest.mark.usefixtures("no_states_left", "no_weights_left")]

WIDTH, DEPTH = 1024, 4  # 4 MiB a layer: weights 16 MiB, states 32 MiB
LIMIT = "32MiB"  # of 64 MiB with gradients


def make_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))


def train(model, optimizer, steps=2):
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        rows = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = model(rows).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.fixture
def checkpoint(tmp_path, saver):
    """A file with a model and its optimizer after two steps, and the losses of the next two."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    path = tmp_path / "checkpoint.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    return path, train(model, optimizer)


def load(path, **options):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    loaded = torch.load(path, map_location="cpu", **options)
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    return model, optimizer, loaded


def bytes_in(tag):
    return 0 if (status := _core.query_tag(tag)) is None else status.resident_bytes


def test_a_checkpoint_is_resumed_within_the_limit_of_training(lms, checkpoint):
    path, expected = checkpoint
    with lms.enable(limit=LIMIT, min_size=SMALL):
        model, optimizer, loaded = load(path, mmap=True)
        del loaded
        assert train(model, optimizer) == expected
        assert lms.stats()["peak_device_bytes"] <= 32 << 20
        assert "can't leave" not in lms.report()


def test_states_whose_checkpoint_is_gone_are_moved(lms, checkpoint):
    path, expected = checkpoint
    with lms.enable(limit="1GiB", min_size=SMALL):
        model, optimizer, loaded = load(path)
        train(model, optimizer, steps=1)
        assert "optimizer states that can't leave" in lms.report() and "torch.load made it" in lms.report()
        assert bytes_in(STATES) < 8 << 20
        del loaded
        gc.collect()
        train(model, optimizer, steps=1)
        assert bytes_in(STATES) >= 32 << 20 and "can't leave" not in lms.report()
        assert expected


def test_states_that_stay_are_named_by_the_error_and_by_the_report(lms, checkpoint):
    path, _ = checkpoint
    with lms.enable(limit="1GiB", min_size=SMALL, overflow=False):
        model, optimizer, loaded = load(path)
        train(model, optimizer, steps=1)
        with pytest.raises(torch.OutOfMemoryError) as failed:
            [torch.empty(40 << 20, dtype=torch.uint8) for _ in range(40)]
        for text in (str(failed.value), lms.report()):
            assert "MiB of optimizer states" in text or "optimizer states that can't leave" in text
            assert "torch.load made it" in text
        assert "docs/lms.md#what-cannot-leave" in str(failed.value)
        assert loaded


def test_states_in_a_region_of_the_program_are_named_with_their_tag(lms, saver, tag):
    with lms.enable(limit="1GiB", min_size=SMALL):
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters())
        with saver.region(tag):
            train(model, optimizer, steps=1)
        train(model, optimizer, steps=1)
        assert f"they have the tag {tag!r}" in lms.report()


def test_what_load_state_dict_copies_goes_where_states_go(lms):
    """As on a GPU, to which it copies states loaded in host memory: here it converts the states' type."""
    plain = torch.optim.Optimizer.load_state_dict
    with lms.enable(limit="24MiB", min_size=SMALL):
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters())
        saved = optimizer.state_dict()
        # Of another type, so that they are copied; without memory of their own size.
        empty = torch.zeros(1, dtype=torch.float64)
        saved["state"] = {
            number: {
                "step": torch.tensor(1.0),
                "exp_avg": empty.expand(each.shape),
                "exp_avg_sq": empty.expand(each.shape),
            }
            for number, each in enumerate(model.parameters())
        }
        optimizer.load_state_dict(saved)
        assert bytes_in(STATES) >= 32 << 20
        assert lms.stats()["peak_device_bytes"] <= 24 << 20
    assert torch.optim.Optimizer.load_state_dict is plain


# --- weights ---


def test_weights_assigned_from_a_checkpoint_are_moved_once_it_is_gone(lms):
    with lms.enable(limit="1GiB", min_size=SMALL):
        model = make_model()
        loaded = {name: value.clone() for name, value in make_model().state_dict().items()}
        model.load_state_dict(loaded, assign=True)
        rows = torch.randn(4, WIDTH)
        model(rows)
        assert "weights that can't leave" in lms.report() and "a checkpoint that is still held" in lms.report()
        del loaded
        gc.collect()
        model(rows)
        assert all(_core.find(layer.weight.data_ptr()).tag == "lms.weights" for layer in model)
        assert "can't leave" not in lms.report()


def test_parameters_inherit_no_verdict_of_others_that_are_gone(lms):
    with lms.enable(limit="1GiB", min_size=SMALL):
        for _ in range(30):
            layer = torch.nn.Linear(256, 256)
            held = layer.weight.detach()
            layer(torch.ones(1, 256))
            del layer, held
            fresh = torch.nn.Linear(256, 256)
            fresh(torch.ones(1, 256))
            assert _core.find(fresh.weight.data_ptr()).tag == "lms.weights"
            del fresh


# --- compiled models ---


def test_a_model_that_is_compiled_as_a_whole_is_named_and_its_blocks_are_not(lms):
    with lms.enable(limit="1GiB", min_size=SMALL, overflow=False):
        blocks = make_model()
        for index, block in enumerate(blocks):
            blocks[index] = torch.compile(block, backend="eager")
        blocks(torch.randn(4, WIDTH)).sum().backward()
        assert "compile its blocks" not in lms.report()
        whole = torch.compile(make_model(), backend="eager")
        whole(torch.randn(4, WIDTH)).sum().backward()
        assert "compile its blocks instead" in lms.report()
        with pytest.raises(torch.OutOfMemoryError, match="compile its blocks instead"):
            [torch.empty(40 << 20, dtype=torch.uint8) for _ in range(40)]


# --- who else knows, and threads ---


def test_states_that_another_library_shares_are_not_copied(lms):
    with lms.enable(limit="1GiB", min_size=SMALL):
        parameter = torch.nn.Parameter(torch.zeros(64, 64))
        optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
        for lend in (torch.from_dlpack, lambda buffer: torch.from_numpy(buffer.numpy())):
            buffer = torch.zeros(64, 64)
            optimizer.state[parameter]["momentum_buffer"] = lend(buffer)
            parameter.grad = torch.ones(64, 64)
            optimizer.step()
            assert buffer[0, 0] == 1


def test_threads_note_modules_at_once(lms):
    import sys
    import threading

    with lms.enable(limit="1GiB", min_size=SMALL):
        errors, interval = [], sys.getswitchinterval()
        sys.setswitchinterval(1e-6)

        def work():
            try:
                for _ in range(20):
                    layers = [torch.nn.Linear(128, 128) for _ in range(4)]
                    held = [layer.weight.detach() for layer in layers]
                    for layer in layers:
                        layer(torch.ones(1, 128))
                    lms.report()
                    del held
                    for layer in layers:
                        layer(torch.ones(1, 128))
            except Exception as error:
                errors.append(error)

        try:
            threads = [threading.Thread(target=work) for _ in range(4)]
            [thread.start() for thread in threads]
            [thread.join() for thread in threads]
        finally:
            sys.setswitchinterval(interval)
        assert errors == []


def test_modules_that_cannot_be_hashed_are_called(lms):
    class Unhashable(torch.nn.Linear):
        def __eq__(self, other):
            return self is other

        __hash__ = None

    with lms.enable(limit="1GiB", min_size=SMALL):
        layer, held = Unhashable(256, 256), torch.randn(256, 256)
        layer.weight = torch.nn.Parameter(held)
        layer(torch.ones(1, 256))
        assert "weights that can't leave" in lms.report()
        del held, layer
        gc.collect()
        assert "weights that can't leave" not in lms.report()


def test_modules_that_cannot_be_hashed_are_not_recomputed(lms):
    class Unhashable(torch.nn.Sequential):
        def __eq__(self, other):
            return self is other

        __hash__ = None

    extension = torch_extension.load("_lms")
    with lms.enable(limit="1GiB", min_size=SMALL, recompute="auto"):
        block, given = Unhashable(torch.nn.Linear(256, 256)), torch.ones(1, 256)
        told = extension.NEW_CHOICE | extension.RECOMPUTE
        found = calls._now.blocks.call(told, torch.nn.Module.__call__, block, (given,), {})
        assert torch.equal(found, block(given))
        assert calls.refused() == {"Unhashable": "a module of it can't be hashed"}
