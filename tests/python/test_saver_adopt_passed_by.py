"""saver.adopt names what it did not look into."""

import functools
import types

import pytest

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.usefixtures("quick_scans")


class Trainer:
    def __init__(self, model):
        self.model = model


def test_locals_name_what_was_passed_by(saver, tag):
    def make():
        model = torch.nn.Linear(64, 64).to(saver.device)
        optimizer = torch.optim.AdamW(model.parameters())
        trainer = Trainer(model)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        later = functools.partial(print, model)
        rows = [1, {"inner": Trainer(model)}]
        number, text, nothing, kind = 1, "a", None, torch.float32

        def closes():
            return model

        def plain():
            return 1

        report = saver.adopt(locals(), tag=tag)
        assert (number, text, nothing, kind, plain(), closes()) == (1, "a", None, torch.float32, 1, model)
        return report, trainer, schedule, later, rows

    report = make()[0]
    assert report.storages == 2
    assert report.passed_by == {
        "trainer": "Trainer",
        "schedule": "StepLR",
        "later": "partial",
        "rows.1.inner": "Trainer",
        "closes": "function",
    }
    assert "not looked into: trainer (Trainer)" in str(report)
    assert report.to_dict()["passed_by"] == report.passed_by


def test_nothing_is_named_where_all_was_looked_into(saver, tag):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)).to(saver.device)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 8, device=saver.device)).sum().backward()
    optimizer.step()
    report = saver.adopt({"model": model, "optimizer": optimizer, "size": torch.Size([1])}, tag=tag)
    assert report.passed_by == {}
    assert "not looked into" not in str(report)


def test_a_long_list_is_cut_in_text_alone(saver, tag):
    report = saver.adopt([torch.ones(4, device=saver.device), *(Trainer(None) for _ in range(30))], tag=tag)
    assert len(report.passed_by) == 30
    assert str(report).endswith("and 22 more")


def test_pythons_own_names_are_no_news(saver, tag):
    report = saver.adopt({"__builtins__": {"x": Trainer(None)}, "__spec__": types.SimpleNamespace()}, tag=tag)
    assert report.passed_by == {}
