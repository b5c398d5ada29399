"""Memory that sleeps keep, and memory that a level-2 sleep drops for good: in a stub of vLLM."""

import warnings

import pytest

torch = pytest.importorskip("torch")

import test_vllm_backend  # noqa: E402
import vllm_stub  # noqa: E402
from ebbtide.integrations import vllm as integration  # noqa: E402
from test_vllm_backend import MIB, Model, start  # noqa: E402

pytestmark = pytest.mark.usefixtures("quick_scans")

allocator, prefix = test_vllm_backend.allocator, test_vllm_backend.prefix  # its fixtures


class Rotary(torch.nn.Module):
    """Made outside of the model."""

    def __init__(self, device):
        super().__init__()
        self.register_buffer("cos_sin", torch.full((2048,), 6.0, device=device))


def test_a_level_2_sleep_names_what_nothing_loads_again(saver, allocator):
    vllm_stub.install()
    integration.register()
    worker = vllm_stub.Worker(vllm_stub.config("ebbtide"), 0, 0, "env://")
    made = {}

    def build():
        model = Model(saver.device)
        model.tables = [torch.full((4096,), 6.0, device=saver.device)]
        model.plain = torch.full((1024,), 6.0, device=saver.device)
        made["rotary"] = Rotary(saver.device)
        return model

    worker.load_model(build)
    with allocator.use_memory_pool(tag="runtime"):
        made["kept"] = torch.full((4096,), 6.0, device=saver.device)
    worker.sleep(level=1)
    worker.wake_up()
    assert made["rotary"].cos_sin[0] == 6 and worker.model.tables[0][0] == 6
    with pytest.warns(RuntimeWarning, match="come back as zeros") as caught:
        worker.sleep(level=2)
    (said,) = (str(one.message) for one in caught)
    assert "Model.plain" in said and "Rotary.cos_sin" in said and "use_memory_pool" in said and '"runtime"' in said
    assert "weight" not in said.partition(": ")[2].partition(". vLLM")[0] and "scale" not in said
    assert "tables" in said or "a list" in said, said
    worker.wake_up()
    assert not made["rotary"].cos_sin.any() and made["kept"][0] == 6
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        worker.sleep(level=2)  # said once
    worker.wake_up()


def test_graphs_sleep_with_the_backend_ebbtide_as_with_vllms_own(saver, allocator):
    vllm_stub.install()
    before = vllm_stub.VllmConfig("ebbtide")
    assert not before.use_cumem_cudagraph_pool
    integration.register()
    integration.register()
    assert before.use_cumem_cudagraph_pool and before.model_config.sleep_mode_backend == "ebbtide"
    assert vllm_stub.VllmConfig("cumem").use_cumem_cudagraph_pool
    assert not vllm_stub.VllmConfig("another").use_cumem_cudagraph_pool
    assert not vllm_stub.VllmConfig("ebbtide", offloads_graphs=False).use_cumem_cudagraph_pool


def test_a_warning_that_is_an_error_comes_before_anything_moves(saver, allocator):
    kept = []
    with allocator.use_memory_pool(tag="weights"):
        kept.append(torch.full((MIB,), 6.0, device=saver.device))
    with warnings.catch_warnings(), pytest.raises(RuntimeWarning, match="neither parameters nor buffers"):
        warnings.simplefilter("error")
        allocator.discard("weights")
    assert kept[0][0] == 6


def test_a_level_2_sleep_of_a_model_alone_says_nothing(saver, allocator):
    vllm_stub.install()
    integration.register()
    worker = start(saver, "ebbtide")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        worker.sleep(level=2)
    worker.wake_up()
