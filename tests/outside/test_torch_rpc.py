"""torch's tests of DistributedDataParallel under distributed autograd: native passes, psengine says that it does not.

psengine exchanges what backward leaves in ``.grad``; gradients of torch.distributed.autograd never come there. They
must not stay on their rank without a word, so psengine's forward raises. What runs: selection.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist
import torch.distributed.rpc as rpc
from outside.selection import DISTRIBUTED_AUTOGRAD, WITHOUT_WRAPPER
from outside.torch_rpc_suite import run_tests
from outside.wrappings import C10D, NATIVE

pytestmark = pytest.mark.skipif(
    not (dist.is_gloo_available() and rpc.is_available()), reason="this torch was built without gloo or RPC"
)

REFUSAL = "expected a forward outside of torch.distributed.autograd contexts, got one inside"
SHORT = {"DdpComparisonTest": ("test_ddp_comparison",)}


@pytest.mark.slow
@pytest.mark.parametrize("wrapping", [NATIVE, C10D], ids=lambda wrapping: wrapping.name)
def test_every_test(wrapping, tmp_path: Path) -> None:
    troubles = run_tests(DISTRIBUTED_AUTOGRAD, wrapping, tmp_path)
    assert set(troubles) == {test for tests in DISTRIBUTED_AUTOGRAD.values() for test in tests}
    for test, trouble in troubles.items():
        if wrapping is NATIVE or test in WITHOUT_WRAPPER:
            assert not trouble, test
        else:
            assert REFUSAL in trouble, f"{test}\n{trouble}"


def test_psengine_refuses_a_forward_whose_gradients_would_stay_in_a_context(tmp_path: Path) -> None:
    [trouble] = run_tests(SHORT, C10D, tmp_path).values()
    assert REFUSAL in trouble
    assert "Fix: call the model outside of the context" in trouble
