"""The callback for transformers, in the real Trainer: requirements/integrations.txt has the packages."""

import pytest

torch = pytest.importorskip("torch")

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from ebbtide.integrations.transformers import EbbtideCallback, SafePoints  # noqa: E402


def is_away(saver, tag):
    """Whether the tag is paused; False while there is none."""
    return tag in saver.tags() and saver.is_paused(tag)


class Model(torch.nn.Module):
    def __init__(self, seen):
        super().__init__()
        self.layer = torch.nn.Linear(256, 256)
        self.seen = seen

    def forward(self, x, labels=None):
        if not self.training:
            self.seen()
        out = self.layer(x)
        return {"loss": (out - labels).square().mean(), "logits": out}


@pytest.fixture
def train(saver, tag, tag2, tmp_path):
    """Makes a trainer whose model calls `seen` at each evaluation step; trains it, and gives (trainer, callback)."""

    def make(seen=lambda: None, callbacks=(), seed=0, **options):
        torch.manual_seed(seed)
        rows = [{"x": torch.randn(256), "labels": torch.randn(256)} for _ in range(8)]
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=4,
            num_train_epochs=2,
            report_to=[],
            disable_tqdm=True,
            use_cpu=saver.device == "cpu",
            save_strategy=options.pop("save_strategy", "no"),
            eval_strategy=options.pop("eval_strategy", "steps"),
            eval_steps=1,
            save_steps=1,
            dataloader_pin_memory=False,
        )
        return transformers.Trainer(
            model=Model(seen), args=arguments, train_dataset=rows, eval_dataset=rows, callbacks=list(callbacks)
        )

    return make


def test_the_states_rest_during_each_evaluation_and_training_is_the_same(saver, tag, tag2, train):
    plain = train()
    plain.train()
    states = []
    rest = EbbtideCallback(tag, tag2, pause=[tag2])
    trainer = train(lambda: states.append((is_away(saver, tag2), is_away(saver, tag))), [rest])
    trainer.train()
    assert states and set(states) == {(True, False)}
    assert not saver.is_paused(tag2)
    assert torch.equal(trainer.model.layer.weight, plain.model.layer.weight)
    assert saver.tags()[tag].size_bytes > 0 and saver.tags()[tag2].size_bytes > 0


def test_a_checkpoint_after_an_evaluation_holds_the_states(saver, tag, tag2, train, tmp_path):
    trainer = train(callbacks=[EbbtideCallback(tag, tag2, pause=[tag2])], save_strategy="steps")
    trainer.train()
    saved = torch.load(tmp_path / "checkpoint-2" / "optimizer.pt", weights_only=True)
    assert any(value.any() for state in saved["state"].values() for value in state.values())


@pytest.mark.parametrize("strategy", ["epoch"])
def test_an_evaluation_at_the_end_of_an_epoch_counts(saver, tag, tag2, train, strategy):
    states = []
    rest = EbbtideCallback(tag, tag2, pause=[tag2])
    train(lambda: states.append(is_away(saver, tag2)), [rest], eval_strategy=strategy).train()
    assert states and all(states)


def test_an_evaluation_of_yours_finds_the_tags_paused_in_a_phase(saver, tag, tag2, train):
    states = []
    rest = EbbtideCallback(tag, tag2, pause=[tag2])
    trainer = train(lambda: states.append(is_away(saver, tag2)), [rest], eval_strategy="no")
    trainer.train()
    trainer.evaluate()
    assert states[0] is False  # transformers says nothing before the first batch
    assert not saver.is_paused(tag2)
    states.clear()
    with rest.phase():
        trainer.evaluate()
    assert states[0] is True and not saver.is_paused(tag2)
    trainer.predict(trainer.eval_dataset)
    assert not saver.is_paused(tag2)


def test_around_nothing_pauses_in_phases_alone(saver, tag, tag2, train):
    states = []
    rest = EbbtideCallback(tag, tag2, pause=[tag2], around=())
    train(lambda: states.append(is_away(saver, tag2)), [rest]).train()
    assert states and not any(states)
    with rest.phase():
        assert saver.is_paused(tag2)
    assert not saver.is_paused(tag2)


def test_an_evaluation_that_fails_is_made_good_by_the_next_training(saver, tag, tag2, train):
    def fail():
        raise RuntimeError("planted")

    rest = EbbtideCallback(tag, tag2, pause=[tag2])
    trainer = train(fail, [rest])
    with pytest.raises(RuntimeError, match="planted"):
        trainer.train()
    assert saver.is_paused(tag2)
    trainer.model.seen = lambda: None
    trainer.train()
    assert not saver.is_paused(tag2)


@pytest.mark.parametrize("around", [["validation"], "evaluate"])
def test_an_unknown_phase_is_refused(around):
    with pytest.raises(ValueError, match="around"):
        EbbtideCallback(around=around)


def test_every_event_that_it_answers_is_one_of_transformers():
    known = {name for name in dir(transformers.TrainerCallback) if name.startswith("on_")}
    assert {name for name in vars(EbbtideCallback) if name.startswith("on_")} <= known
    assert {name for name in vars(SafePoints) if name.startswith("on_")} <= known


def test_steps_and_tokens_are_safe_points(saver, train, monkeypatch):
    waits = []
    monkeypatch.setattr(saver, "safe_point", lambda wait: waits.append(wait))
    train(callbacks=[SafePoints()], eval_strategy="no").train()
    assert waits == [True] * 4
    config = transformers.GPT2Config(vocab_size=8, n_positions=16, n_embd=8, n_layer=1, n_head=1, eos_token_id=None)
    model = transformers.GPT2LMHeadModel(config)
    model.generate(torch.ones(2, 1, dtype=torch.long), max_new_tokens=3, stopping_criteria=[SafePoints()])
    assert waits == [True] * 7
