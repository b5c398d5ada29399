"""A model whose gradients and optimizer states are made outside of its tag, for the tests of saver.outside."""

import torch

WIDTH = 512
WEIGHT = 4 * WIDTH * WIDTH  # 1 MiB


def make_model(saver):
    model = torch.nn.Linear(WIDTH, WIDTH, bias=False)
    model.register_buffer("mask", torch.zeros(WIDTH, WIDTH))
    return model.to(saver.device)


def backward(saver, model):
    model(torch.ones(2, WIDTH, device=saver.device)).sum().backward()


def trained(saver, tag, make=torch.optim.AdamW, **options):
    """A model in a tag whose gradients and optimizer states are made outside."""
    with saver.region(tag):
        model = make_model(saver)
    optimizer = make(model.parameters(), **options)
    backward(saver, model)
    optimizer.step()
    return model, optimizer
