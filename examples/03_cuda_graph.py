"""Pauses and resumes the memory of a captured CUDA graph, which then replays as before. Needs a GPU."""

import sys

import torch
from ebbtide import saver

if saver.device != "cuda":
    print("this example needs a GPU: CUDA graphs have no counterpart on the simulated device")
    sys.exit(0)

torch.manual_seed(0)
with saver.region("weights"):
    model = torch.nn.Sequential(torch.nn.Linear(2048, 8192), torch.nn.GELU(), torch.nn.Linear(8192, 2048)).cuda()
inputs = torch.randn(64, 2048, device="cuda")

with torch.no_grad():
    side_stream = torch.cuda.Stream()  # torch requires a warm-up on a side stream before a capture
    side_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side_stream):
        for _ in range(3):
            model(inputs)
    torch.cuda.current_stream().wait_stream(side_stream)
    graph = torch.cuda.CUDAGraph()
    with saver.cuda_graph(graph, tag="graphs"):
        outputs = model(inputs)

graph.replay()
expected = outputs.clone()

print(saver.pause("graphs", "weights"))
print(saver.resume("graphs", "weights"))

inputs.copy_(torch.randn_like(inputs))
graph.replay()
with torch.no_grad():
    assert torch.allclose(outputs, model(inputs), rtol=1e-3, atol=1e-4)
    assert not torch.equal(outputs, expected)
print("the graph replays as before, also on new input")
