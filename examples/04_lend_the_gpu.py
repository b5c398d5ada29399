"""A notebook lends its GPU: its model and optimizer, which were made without ebbtide, are adopted and paused.

Later they are resumed, and training continues. A twin that was never paused ends with the same weights, bit for bit.
"""

import torch
from ebbtide import saver
from ebbtide.demo.determinism import deterministic
from ebbtide.demo.model import LanguageModel
from ebbtide.demo.text import VOCABULARY_SIZE, encode, load_text
from torch.nn import functional

CONTEXT, BATCH = 32, 8
data = torch.tensor(encode(load_text(20_000)), device=saver.device)


def make_notebook():
    torch.manual_seed(0)
    model = LanguageModel(VOCABULARY_SIZE, CONTEXT, width=64, layers=2, heads=2).to(saver.device)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def train(model, optimizer, first_step, steps):
    for step in range(first_step, first_step + steps):
        sequences = data[step * BATCH * CONTEXT :][: BATCH * CONTEXT].view(BATCH, CONTEXT)
        loss = functional.cross_entropy(model(sequences[:, :-1]).flatten(0, 1), sequences[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


with deterministic():
    model, optimizer = make_notebook()
    print(f"loss after 10 steps: {train(model, optimizer, 0, 10):.3f}")

    print(saver.adopt(model, optimizer, tag="notebook"))
    report = saver.pause("notebook")
    print(report)
    assert report.bytes > 0 and saver.is_paused("notebook")
    print("other programs have the device for an hour ...")
    print(saver.resume("notebook"))

    print(f"loss after 20 steps: {train(model, optimizer, 10, 10):.3f}")

    twin, twin_optimizer = make_notebook()
    train(twin, twin_optimizer, 0, 20)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True))
    print("the same weights as without the pause")
