"""The callback for lightning, in the real Trainer: requirements/integrations.txt has the package."""

import pytest

torch = pytest.importorskip("torch")

lightning = pytest.importorskip("lightning.pytorch")

from ebbtide.integrations.lightning import EbbtideCallback, SafePoints  # noqa: E402


def is_away(saver, tag):
    """Whether the tag is paused; False while there is none."""
    return tag in saver.tags() and saver.is_paused(tag)


class Model(lightning.LightningModule):
    def __init__(self, seen):
        super().__init__()
        self.layer = torch.nn.Linear(256, 256)
        self.seen = seen

    def training_step(self, batch, index):
        return self.layer(batch).square().mean()

    def validation_step(self, batch, index):
        self.seen("validation")
        self.layer(batch)

    def test_step(self, batch, index):
        self.seen("test")

    def predict_step(self, batch, index):
        self.seen("predict")
        return self.layer(batch)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


@pytest.fixture
def make(saver, tmp_path):
    """A trainer and its model."""

    def make(seen, callbacks):
        torch.manual_seed(0)
        trainer = lightning.Trainer(
            accelerator="cpu" if saver.device == "cpu" else "gpu",
            devices=1,
            max_epochs=2,
            callbacks=callbacks,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            default_root_dir=tmp_path,
        )
        return trainer, Model(seen), torch.utils.data.DataLoader(torch.randn(8, 256), batch_size=4)

    return make


def test_the_states_rest_around_each_phase_and_training_is_the_same(saver, tag, tag2, make):
    trainer, plain, data = make(lambda _: None, [])
    trainer.fit(plain, data, data)
    states = []
    rest = EbbtideCallback(tag, tag2, pause=[tag2])

    def seen(phase):
        states.append((phase, is_away(saver, tag2), is_away(saver, tag)))

    trainer, model, data = make(seen, [rest])
    trainer.fit(model, data, data)
    assert not saver.is_paused(tag2)
    trainer.test(model, data, verbose=False)
    trainer.predict(model, data)
    assert set(states) == {(phase, True, False) for phase in ("validation", "test", "predict")}
    assert not saver.is_paused(tag2)
    assert torch.equal(model.layer.weight.cpu(), plain.layer.weight.cpu())


def test_a_phase_that_is_not_named_is_left_alone(saver, tag, tag2, make):
    states, own = [], []
    rest = EbbtideCallback(tag, tag2, pause=[tag2], around=["test"])

    class Own(lightning.Callback):
        def on_train_end(self, trainer, pl_module):
            """Before the trainer takes the states of a GPU to the host, which is the end of fit()."""
            with rest.phase():
                own.append(is_away(saver, tag2))
            own.append(is_away(saver, tag2))

    trainer, model, data = make(lambda phase: states.append(is_away(saver, tag2)), [rest, Own()])
    trainer.fit(model, data, data)
    assert states and not any(states)
    assert own == [True, False]


def test_a_validation_that_fails_brings_everything_back(saver, tag, tag2, make):
    def fail(phase):
        assert saver.is_paused(tag2)
        raise RuntimeError("planted")

    trainer, model, data = make(fail, [EbbtideCallback(tag, tag2, pause=[tag2])])
    with pytest.raises(RuntimeError, match="planted"):
        trainer.fit(model, data, data)
    assert not saver.is_paused(tag2)


@pytest.mark.parametrize("around", [["evaluate"], "test"])
def test_an_unknown_phase_is_refused(around):
    with pytest.raises(ValueError, match="around"):
        EbbtideCallback(around=around)


def test_every_event_that_it_answers_is_one_of_lightning():
    known = {name for name in dir(lightning.Callback) if name.startswith("on_")}
    assert {name for name in vars(EbbtideCallback) if name.startswith("on_")} <= known


def test_batches_are_safe_points(saver, make, monkeypatch):
    waits = []
    monkeypatch.setattr(saver, "safe_point", lambda wait: waits.append(wait))
    trainer, model, loader = make(lambda phase: None, [SafePoints()])
    trainer.fit(model, loader, loader)
    trainer.test(model, loader)
    assert waits == [True] * (4 + 4 + 2)
