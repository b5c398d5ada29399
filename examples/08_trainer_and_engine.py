"""A trainer and an engine, two processes that take turns on one GPU: each hands its memory to the other. The engine
uses the trainer's weights where they are, so that an update costs nothing.

    python examples/08_trainer_and_engine.py [ROUNDS]
"""

import os
import sys
from multiprocessing.connection import Connection

import torch
from ebbtide import saver
from ebbtide.demo.model import LanguageModel
from ebbtide.demo.text import VOCABULARY_SIZE, decode, encode, load_text
from torch.nn.functional import cross_entropy

STEPS, BATCH, CONTEXT = 10, 16, 64
SIZES = {"width": 96, "layers": 2, "heads": 4}


def run_engine(pipe: Connection) -> None:
    weights = {name: saver.attach(share) for name, share in pipe.recv().items()}
    with torch.device("meta"):
        model = LanguageModel(VOCABULARY_SIZE, CONTEXT, **SIZES).requires_grad_(False)
    model.load_state_dict(weights, assign=True)
    with saver.region("kv_cache", backup=None, exportable=True):  # its content may be dropped
        cache = model.make_cache(BATCH)
    saver.pause("kv_cache")
    pipe.send("ready")
    prompt = torch.tensor(encode(load_text())[:16], device=saver.device).repeat(BATCH, 1)
    while pipe.recv() == "generate":
        saver.resume("kv_cache", timeout=60)
        tokens = model.generate(prompt, cache, torch.Generator(saver.device).manual_seed(0))
        pipe.send(decode(tokens[0].tolist()))
        saver.hand_over(pause="kv_cache", to=os.getppid())


def run_trainer(pipe: Connection, engine: int, rounds: int) -> None:
    text = torch.tensor(encode(load_text()), device=saver.device)
    torch.manual_seed(0)
    with saver.region("weights", exportable=True):  # stays, for both
        model = LanguageModel(VOCABULARY_SIZE, CONTEXT, **SIZES).to(saver.device)
    trainer_memory = saver.region("trainer", retain=True, exportable=True)
    with trainer_memory:
        for parameter in model.parameters():  # made here, because backward allocates in threads of its own
            parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3)
    pipe.send({name: saver.share(value.detach()) for name, value in model.state_dict().items()})
    pipe.recv()
    for number in range(1, rounds + 1):
        for _ in range(STEPS):
            starts = torch.randint(len(text) - CONTEXT - 1, (BATCH, 1), device=saver.device)
            sequences = text[starts + torch.arange(CONTEXT + 1, device=saver.device)]
            loss = cross_entropy(model(sequences[:, :-1]).flatten(0, 1), sequences[:, 1:].flatten())
            optimizer.zero_grad(set_to_none=False)
            loss.backward()
            with trainer_memory:  # the first step allocates the optimizer's states
                optimizer.step()
        pipe.send("generate")
        report = saver.hand_over(pause="trainer", to=engine)
        generated = pipe.recv()
        saver.resume("trainer", timeout=60)
        print(f"round {number}: loss {loss.item():.3f}, handed over {report.bytes >> 20} MiB, generated {generated!r}")
    pipe.send("stop")


if __name__ == "__main__":
    os.environ.setdefault("EBBTIDE_SIM_SHARED", "trainer-and-engine")  # without a GPU both see one simulated device
    context = torch.multiprocessing.get_context("spawn")
    mine, its = context.Pipe()
    engine = context.Process(target=run_engine, args=(its,))
    engine.start()
    assert engine.pid is not None
    run_trainer(mine, engine.pid, int(sys.argv[1]) if len(sys.argv) > 1 else 3)
    engine.join()
