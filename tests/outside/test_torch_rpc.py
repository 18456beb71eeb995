"""psengine refuses a forward inside of torch.distributed.autograd.

It exchanges what backward leaves in ``.grad``; gradients of distributed autograd never come there. They must not stay
on their rank without a word.
"""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc
from support.expectations import raises
from support.processes import run_ranks
from torch.distributed import autograd

import psengine

pytestmark = pytest.mark.skipif(
    not (dist.is_gloo_available() and rpc.is_available()), reason="this torch was built without gloo or RPC"
)


def forward_in_a_context(rank: int, world_size: int, directory: Path) -> None:
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{directory}/rpc")
    rpc.init_rpc("worker", rank=rank, world_size=world_size, rpc_backend_options=options)
    model = psengine.DistributedDataParallel(torch.nn.Linear(2, 2))
    text = "expected a forward outside of torch.distributed.autograd contexts, got one inside"
    with autograd.context(), raises(psengine.PSEngineError, text, "Fix: call the model outside of the context"):
        model(torch.ones(1, 2))
    rpc.shutdown()


def test_a_forward_whose_gradients_would_stay_in_a_context_is_refused(tmp_path: Path) -> None:
    run_ranks(forward_in_a_context, 1, tmp_path)
