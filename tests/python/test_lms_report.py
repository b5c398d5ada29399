"""What `ebbtide.lms.report` and `ebbtide.lms.plot` say of the plan for the latest step."""

import re
import sys

import pytest

torch = pytest.importorskip("torch")

import lms_models  # noqa: E402
from ebbtide import torch_extension  # noqa: E402
from lms_model import SMALL  # noqa: E402

pytestmark = pytest.mark.sim_only

SLOW = 1e6  # bytes a second


@pytest.fixture(scope="module")
def peaks():
    """For `needed`, which is measured once."""
    return {}


@pytest.fixture
def needed(lms, peaks):
    if not peaks:
        with lms.enable(limit="4GiB", min_size=SMALL):
            train()
            peaks["train"] = lms.stats()["peak_device_bytes"]
    return peaks["train"]


@pytest.fixture
def extension(lms):
    module = torch_extension.load("_lms")
    yield module
    module.assume_rate(0)


def train(steps=4):
    torch.manual_seed(1)
    step = lms_models.gpt(depth=6)
    for number in range(steps):
        step(number)


def rows(text):
    return dict(re.split(r"  +", line, maxsplit=1) for line in text.splitlines() if "  " in line)


def seconds(row):
    return float(row.split(" s")[0])


def test_no_plan_no_forecast(lms):
    with lms.enable(limit="4GiB", min_size=SMALL):
        train()
        assert not [name for name in rows(lms.report()) if "forecast" in name or "saved in a step" in name]


@pytest.mark.parametrize("recompute", [False, "auto"])
def test_the_plan_by_module_and_what_other_limits_give(lms, extension, needed, recompute):
    with lms.enable(limit=int(0.6 * needed), min_size=SMALL, recompute=recompute):
        extension.assume_rate(SLOW)
        train()
        text = lms.report()
    found = rows(text)
    assert all(len(line) <= 120 for line in text.splitlines())
    saved = {name: row for name, row in found.items() if name.startswith("saved in a step: ")}
    assert "saved in a step: Attention" in saved and "saved in a step: Linear" not in saved, "its layers count there"
    assert any("kept" in row for row in saved.values())
    leaves = "recomputed" if recompute else "evicted"
    assert any(leaves in row for row in saved.values())
    forecasts = [row for name, row in found.items() if name.startswith("forecast of a step within ")]
    assert len(forecasts) == 4
    assert [seconds(row) for row in forecasts] == sorted(map(seconds, forecasts), reverse=True)
    assert leaves in forecasts[0] and forecasts[-1].endswith("everything fits")


def test_the_choices_that_steps_decided_between(lms, needed, monkeypatch):
    with lms.enable(limit=int(0.6 * needed), min_size=SMALL):
        train()
        module = sys.modules["ebbtide.lms.report"]
        step = module._latest_step()
        assert step.choices and sum(is_current for *_, is_current in step.choices) == 1
        choices = [((0.25, 0, 12, 0), 0.5, True), ((0.125, 3 << 20, 1, 0), 0.0, False)]
        monkeypatch.setattr(module, "_latest_step", lambda: step._replace(choices=choices))
        found = rows(lms.report())
    assert found["steps as they are now"] == "0.500 s, forecast 0.250 s, 12 calls recomputed"
    assert found["steps of another choice"] == "not measured, forecast 0.125 s, 3.0 MiB evicted, 1 call recomputed"


@pytest.mark.parametrize("ranks", [1, 2])
def test_choices_are_measured_unless_steps_wait_for_other_ranks(lms, extension, needed, monkeypatch, ranks):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: ranks)
    with lms.enable(limit=int(0.6 * needed), min_size=SMALL, recompute="auto"):
        extension.assume_rate(SLOW)
        train(14)
        step = sys.modules["ebbtide.lms.report"]._latest_step()
    measured = [is_current for _, measured_seconds, is_current in step.choices if measured_seconds]
    assert len(step.choices) > 1
    assert measured == [True] if ranks > 1 else len(measured) == len(step.choices)


@pytest.mark.parametrize(("ending", "begins"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_a_picture_of_a_step(lms, needed, tmp_path, ending, begins):
    pytest.importorskip("matplotlib")
    with lms.enable(limit=int(0.6 * needed), min_size=SMALL):
        train()
        lms.plot(tmp_path / f"step.{ending}")
    assert (tmp_path / f"step.{ending}").read_bytes().startswith(begins)


def test_without_matplotlib(lms, needed, tmp_path, monkeypatch):
    with lms.enable(limit=int(0.6 * needed), min_size=SMALL):
        train()
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        with pytest.raises(ImportError, match=r"pip install 'ebbtide\[plot\]'"):
            lms.plot(tmp_path / "step.png")


def test_without_a_step(run_python):
    result = run_python(
        """
        import ebbtide, torch
        for _ in range(2):
            try:
                ebbtide.lms.plot("step.png")
            except ebbtide.StateError as error:
                print(error)
            ebbtide.lms.enable(limit="1GiB")
        """
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("there is no step to draw yet") == 2
