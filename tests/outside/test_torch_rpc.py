"""A test of torch's of DistributedDataParallel under distributed autograd, which psengine refuses.

psengine exchanges what backward leaves in ``.grad``; gradients of torch.distributed.autograd never come there. They
must not stay on their rank without a word, so psengine's forward raises.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist
import torch.distributed.rpc as rpc
from outside.torch_rpc_suite import run_tests
from outside.wrappings import C10D

pytestmark = pytest.mark.skipif(
    not (dist.is_gloo_available() and rpc.is_available()), reason="this torch was built without gloo or RPC"
)

REFUSAL = "expected a forward outside of torch.distributed.autograd contexts, got one inside"
SHORT = {"DdpComparisonTest": ("test_ddp_comparison",)}


def test_psengine_refuses_a_forward_whose_gradients_would_stay_in_a_context(tmp_path: Path) -> None:
    [trouble] = run_tests(SHORT, C10D, tmp_path).values()
    assert REFUSAL in trouble
    assert "Fix: call the model outside of the context" in trouble
