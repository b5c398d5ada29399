"""A run of Hugging Face's Trainer on a Llama of random weights and tokens, as its users write it.

Arguments: hidden, layers, heads, feed, vocabulary, tokens, batch, steps. `times_parts` also times forward, backward and
the rest of each step, with the device idle between them.
"""

import sys
import tempfile
import time
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from benchmarks.programs.common import IS_GPU, answer, arguments, synchronize


class Watch(TrainerCallback):
    """Seconds of each step, and of its parts."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {"step": []}
        self.last: dict[str, float] = {}
        self.lms: list[dict[str, float]] = []  # ebbtide's statistics after each step

    def note(self, name: str, since: str) -> None:
        synchronize()
        self.last[name] = time.perf_counter()
        self.seconds.setdefault(name, []).append(self.last[name] - self.last[since])

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        synchronize()
        self.last["begin"] = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.note("step", "begin")
        lms = sys.modules.get("ebbtide.lms")
        if lms and lms.enabled:
            self.lms.append(lms.stats())


class PartsWatch(Watch):
    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.note("backward", "forward")

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.note("rest", "backward")
        super().on_step_end()


def main() -> None:
    given = arguments()
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=given.hidden,
        num_hidden_layers=given.layers,
        num_attention_heads=given.heads,
        num_key_value_heads=given.heads,
        intermediate_size=given.feed,
        vocab_size=given.vocabulary,
        max_position_embeddings=given.tokens,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    rows = torch.randint(given.vocabulary, (given.batch * given.steps, given.tokens)).tolist()
    watch = PartsWatch() if getattr(given, "times_parts", False) else Watch()
    if isinstance(watch, PartsWatch):
        model.register_forward_hook(lambda *_: watch.note("forward", "begin"))
    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=given.batch,
            max_steps=given.steps,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        data = [{"input_ids": row, "labels": row} for row in rows]
        trainer = Trainer(model=model, args=options, train_dataset=data, callbacks=[watch])
        trainer.train()
    answer(
        seconds=watch.seconds,
        losses=[row["loss"] for row in trainer.state.log_history if "loss" in row],
        peak_bytes=torch.cuda.max_memory_reserved() if IS_GPU else 0,
        lms=watch.lms[-2:],
    )


if __name__ == "__main__":
    main()
