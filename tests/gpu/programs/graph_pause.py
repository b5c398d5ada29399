"""A CUDA graph in one of torch's own pools, which is paused and resumed between replays, several times."""

import torch
from ebbtide import saver

torch.manual_seed(0)
with torch.device("cuda"):
    layers = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 1024))
    static = torch.randn(128, 1024)
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side), torch.no_grad():
    for _ in range(3):
        layers(static)
torch.cuda.current_stream().wait_stream(side)
graph = torch.cuda.CUDAGraph()
with torch.no_grad(), torch.cuda.graph(graph):
    result = layers(static) + 1

for seed in range(3):
    values = torch.randn(128, 1024, generator=torch.Generator().manual_seed(seed))
    static.copy_(values)
    graph.replay()
    torch.cuda.synchronize()
    want = result.cpu()
    result.zero_()
    torch.cuda.synchronize()
    free_bytes = torch.cuda.mem_get_info()[0]
    saver.pause()
    assert torch.cuda.mem_get_info()[0] > free_bytes + (32 << 20)
    saver.resume()
    assert not result.any() and torch.equal(static.cpu(), values)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(result.cpu(), want)
    with torch.no_grad():
        assert torch.allclose(result, layers(static) + 1, atol=1e-3)
print("all is right")
