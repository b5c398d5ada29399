"""An RL loop on one device: a trainer and a generator take turns. Each is paused while the other works."""

import torch
from ebbtide import saver
from ebbtide.demo.model import LanguageModel
from ebbtide.demo.text import VOCABULARY_SIZE, decode, encode, load_text
from torch.nn.functional import cross_entropy

ROUNDS, STEPS, BATCH, CONTEXT = 3, 30, 16, 64
text = torch.tensor(encode(load_text()), device=saver.device)
torch.manual_seed(0)
trainer_memory = saver.region("trainer", retain=True)  # later pauses need no fresh host memory

with trainer_memory:
    trainer = LanguageModel(VOCABULARY_SIZE, CONTEXT, width=96, layers=2, heads=4).to(saver.device)
    for parameter in trainer.parameters():  # made here, because backward allocates in threads of its own
        parameter.grad = torch.zeros_like(parameter)
optimizer = torch.optim.AdamW(trainer.parameters(), lr=6e-3)
saver.pause("trainer")
with saver.region("generator", retain=True):
    generator = LanguageModel(VOCABULARY_SIZE, CONTEXT, width=96, layers=2, heads=4).to(saver.device)
    generator.requires_grad_(False)
with saver.region("kv_cache", backup=None):  # its content may be dropped: each generation fills it anew
    cache = generator.make_cache(BATCH)

for round_number in range(ROUNDS):
    print(saver.swap(pause=["generator", "kv_cache"], resume="trainer"))
    for _ in range(STEPS):
        starts = torch.randint(len(text) - CONTEXT - 1, (BATCH, 1), device=saver.device)
        sequences = text[starts + torch.arange(CONTEXT + 1, device=saver.device)]
        loss = cross_entropy(trainer(sequences[:, :-1]).flatten(0, 1), sequences[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        with trainer_memory:  # the first step allocates the optimizer's states
            optimizer.step()
    for mine, theirs in zip(trainer.parameters(), generator.parameters(), strict=True):
        stored = saver.backup_of(theirs, writable=True)  # None if nothing is paused, as with EBBTIDE_DRIVER=off
        (theirs if stored is None else stored).copy_(mine.detach())
    del stored  # a backup with a live view is not retained
    assert not saver.outside(trainer, optimizer)  # weights, gradients and states: all leave with the trainer
    print(saver.swap(pause="trainer", resume=["generator", "kv_cache"]))
    tokens = generator.generate(text[:16].repeat(BATCH, 1), cache, torch.Generator(saver.device).manual_seed(0))
    print(f"round {round_number + 1}: loss {loss.item():.3f}, generated {decode(tokens[0].tolist())!r}")

saver.resume("trainer")
assert all(torch.equal(mine, theirs) for mine, theirs in zip(trainer.parameters(), generator.parameters(), strict=True))
print("the generator has the trainer's weights, bit for bit")
