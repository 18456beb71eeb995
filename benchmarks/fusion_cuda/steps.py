"""Training steps under native DDP and psengine: their time on one rank, their gradients' bits on two."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from fusion_cuda.passes import add_both, device_clock
from harness.ranks import GROUP_TIMEOUT_S, Rank, run_ranks
from harness.record import Record
from harness.tables import Table
from harness.turns import Turn, take_turns
from step_overhead.models import GPT, ResidualNet
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

NATIVE = "native"
WARM_UP_ROUNDS = 5  # buckets are rebuilt before the second forward


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.path = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = (
            nn.Identity()
            if inputs == outputs
            else nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.path(x) + self.shortcut(x))


def _images() -> tuple[Tensor, Tensor]:
    return torch.randn(16, 3, 224, 224, device="cuda"), torch.randint(1000, (16,), device="cuda")


def _text() -> tuple[Tensor, Tensor]:
    text = torch.randint(8192, (4, 257), device="cuda")
    return text[:, :-1].contiguous(), text[:, 1:].flatten()


@dataclass(frozen=True)
class Workload:
    what: str
    build: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]


WORKLOADS = {
    "cnn": Workload(
        "ResNet-50, batch 16", lambda: ResidualNet(Bottleneck, (3, 4, 6, 3), classes=1000, expansion=4), _images
    ),
    "gpt": Workload(
        "GPT, 12 blocks of width 768, batch 4 x 256",
        lambda: GPT(vocabulary=8192, width=768, blocks=12, context=256),
        _text,
    ),
}


def _native(module: nn.Module, **options: Any) -> nn.Module:
    return DistributedDataParallel(module, device_ids=[0], **options)


def _psengine(module: nn.Module, **options: Any) -> nn.Module:
    import psengine

    return psengine.DistributedDataParallel(module, device_ids=[0], **options)


CANDIDATES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda module: module,
    NATIVE: _native,
    "psengine": _psengine,
    "native, views": lambda module: _native(module, gradient_as_bucket_view=True),
    "psengine, views": lambda module: _psengine(module, gradient_as_bucket_view=True),
}


# ---- time, one rank with nccl --------------------------------------------------------------------------------------


def turn_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Turn:
    def prepare() -> None:
        model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()

    return Turn(lambda: F.cross_entropy(model(inputs), targets).backward(), before=prepare)


def measure(rounds: int, record: Record) -> None:
    """Time the candidates' steps in this process, the only rank of an nccl group."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, timeout=timedelta(seconds=GROUP_TIMEOUT_S))
    try:
        for workload in WORKLOADS.values():
            inputs, targets = workload.batch()
            turns = {}
            for candidate, wrap in CANDIDATES.items():
                torch.manual_seed(0)
                turns[candidate] = turn_of(wrap(workload.build().cuda()), inputs, targets)
            shown = take_turns(turns, rounds, warm_up=WARM_UP_ROUNDS, clock=device_clock(0))
            add_both(record, {"model": workload.what, "ranks": 1}, shown)
    finally:
        dist.destroy_process_group()


# ---- bits, two ranks on one GPU with gloo --------------------------------------------------------------------------


def digest_of(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def digests(rank: Rank) -> dict[str, dict[str, list[str]]]:
    """For each model and candidate, the digest of every gradient after three steps."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS is deterministic only with it
    torch.cuda.set_device(0)
    # Atomic additions would give every candidate other gradients at every run; "native again" shows what is left.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    found: dict[str, dict[str, list[str]]] = {}
    for name, workload in WORKLOADS.items():
        found[name] = {}
        for candidate in ("native", "native again", "psengine", "psengine, views"):
            torch.manual_seed(0)
            model = CANDIDATES[candidate.removesuffix(" again")](workload.build().cuda())
            torch.manual_seed(1 + rank.rank)
            for _ in range(3):
                inputs, targets = workload.batch()
                model.zero_grad(set_to_none=True)
                F.cross_entropy(model(inputs), targets).backward()
            torch.cuda.synchronize()
            found[name][candidate] = [digest_of(p.grad) for p in model.parameters() if p.grad is not None]
            del model
    return found


def compare_bits(deadline_s: float, record: Record) -> None:
    """Compare every gradient of two ranks with native DDP's; nccl would refuse two ranks on one GPU."""
    first, second = run_ranks(digests, 2, deadline_s=deadline_s)
    rows = []
    for name, by_candidate in first.items():
        for candidate, own in by_candidate.items():
            if candidate == NATIVE:
                continue
            than_native = sum(a != b for a, b in zip(own, by_candidate[NATIVE], strict=True))
            between_ranks = sum(a != b for a, b in zip(own, second[name][candidate], strict=True))
            rows.append([WORKLOADS[name].what, candidate, len(own), than_native, between_ranks])
    title = "Gradients, two ranks on one GPU, gloo: how many have other bits"
    columns = ["model", "candidate", "gradients", "than native's", "than the other rank's"]
    record.tables.append(Table(title, columns, rows))
