"""Large model support: a forward pass without gradients, from the call of the outermost module to its end."""

import pytest

torch = pytest.importorskip("torch")

from ebbtide.lms import weights  # noqa: E402
from lms_model import SMALL, make_model  # noqa: E402
from lms_states import content, extension  # noqa: E402
from lms_weights import evaluate  # noqa: E402

pytestmark = [  # tests/gpu/test_gpu_lms_forward.py is for GPUs
    pytest.mark.sim_only,
    pytest.mark.usefixtures("no_weights_left"),
]


@pytest.mark.parametrize("kind", [torch.nn.Linear, torch.nn.Conv2d])
@pytest.mark.parametrize("limit", ["1GiB", "4MiB"])
def test_weights_that_something_computes_are_asked_for_once(lms, kind, limit):
    """In training, each look at a weight with a spectral norm goes one iteration on."""

    def run():
        torch.manual_seed(3)
        layer = kind(512, 512, *([] if kind is torch.nn.Linear else [1]))
        model = torch.nn.Sequential(torch.nn.utils.parametrizations.spectral_norm(layer), torch.nn.ReLU()).train()
        given = torch.ones(2, 512) if kind is torch.nn.Linear else torch.ones(2, 512, 2, 2)
        with torch.no_grad():
            return [model(given).sum().item() for _ in range(3)], content(model.buffers())

    plain = run()
    with lms.enable(limit=limit, min_size=SMALL):
        make_model(2, 512)(torch.ones(1, 512))
        assert run() == plain


def test_a_pass_ends_with_the_outermost_module(lms, monkeypatch):
    ended = []
    lms.enable(limit="1GiB", min_size=SMALL)
    model = make_model(4, 512)
    evaluate(model, 1)
    monkeypatch.setattr(weights._now.layers, "end_pass", lambda: ended.append(extension().module_depth()))
    evaluate(model, 1)
    assert ended == [0, 0], "at its begin, where an interrupt has left one, and at its end"
    del ended[:]
    optimizer = torch.optim.LBFGS([torch.nn.Parameter(torch.ones(2))], max_iter=1)

    def closure():
        evaluate(model, 1)
        return torch.zeros(1)

    optimizer.step(closure)
    assert len(ended) >= 2 and not any(ended), "at both ends of each call of the closure"
