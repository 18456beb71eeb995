"""torch.compile around, inside and under the wrapper."""

import subprocess
import sys

import torch
from support.native_twins import assert_same_gradients, seeded
from support.processes import in_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Native

from psengine import DistributedDataParallel


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(400, 400) for _ in range(6)])

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


@in_ranks(2)
def test_compiled_models_are_split_at_buckets_like_native(rank, world_size):
    import torch._dynamo

    torch.manual_seed(rank)
    batches = torch.randn(3, 2, 400)

    def run(cls, style):
        graphs = []

        def backend(graph, inputs):
            graphs.append(graph)
            return graph.forward

        torch._dynamo.reset()
        module = seeded(Stack)
        if style == "inside":
            module = torch.compile(module, backend=backend)
        ddp = cls(module, bucket_cap_mb=1)
        step = torch.compile(ddp, backend=backend) if style == "around" else ddp
        for x in batches:
            ddp.zero_grad()
            step(x).sum().backward()
        return ddp, len(graphs)

    for style in ("around", "inside"):
        ours, our_graphs = run(DistributedDataParallel, style)
        native, native_graphs = run(Native, style)
        assert_same_gradients(ours, native)
        assert our_graphs == native_graphs > 1, f"{style}: split at bucket boundaries, {our_graphs}, {native_graphs}"


def test_dynamo_is_not_loaded_for_those_who_do_not_compile():
    program = """
import sys, torch, torch.distributed as dist, psengine
psengine.init()
ddp = psengine.DistributedDataParallel(torch.nn.Linear(2, 2))
ddp(torch.ones(1, 2)).sum().backward()
psengine.shutdown()
sys.exit("torch._dynamo" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
