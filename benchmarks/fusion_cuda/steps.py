"""Training steps under native DDP and psengine: their time on one rank, their gradients' bits on two."""

from __future__ import annotations

import hashlib
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "step_overhead"))

from machine import GROUP_TIMEOUT_S, run_ranks
from models import GPT, ResidualNet

WARM_UP_STEPS = 5  # buckets are rebuilt before the second forward


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
    "native": _native,
    "psengine": _psengine,
    "native, views": lambda module: _native(module, gradient_as_bucket_view=True),
    "psengine, views": lambda module: _psengine(module, gradient_as_bucket_view=True),
}


# ---- time, one rank with nccl --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """Milliseconds over the repetitions; ``ratio`` is to native's step of the same repetition."""

    workload: str
    candidate: str
    parameters: int
    step_ms: float
    host_ms: float
    ratio: float


def time_step(model: nn.Module, inputs: Tensor, targets: Tensor) -> tuple[float, float]:
    """Return milliseconds on the device and until the host was free again."""
    model.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    begin = time.perf_counter()
    F.cross_entropy(model(inputs), targets).backward()
    host_ms = 1e3 * (time.perf_counter() - begin)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end), host_ms


def measure_workload(name: str, repetitions: int) -> list[Row]:
    workload = WORKLOADS[name]
    models = {}
    for candidate, wrap in CANDIDATES.items():
        torch.manual_seed(0)
        models[candidate] = wrap(workload.build().cuda())
    inputs, targets = workload.batch()
    for _ in range(WARM_UP_STEPS):
        for model in models.values():
            time_step(model, inputs, targets)
    times: dict[str, list[tuple[float, float]]] = {candidate: [] for candidate in models}
    names = list(models)
    for repetition in range(repetitions):
        turn = repetition % len(names)
        order = names[turn:] + names[:turn]
        for candidate in order if repetition // len(names) % 2 == 0 else reversed(order):
            times[candidate].append(time_step(models[candidate], inputs, targets))
    parameters = len(list(models["plain"].parameters()))
    rows = []
    for candidate, own in times.items():
        ratio = statistics.median(step / native for (step, _), (native, _) in zip(own, times["native"], strict=True))
        step_ms = statistics.median(step for step, _ in own)
        host_ms = statistics.median(host for _, host in own)
        rows.append(Row(name, candidate, parameters, step_ms, host_ms, ratio))
    return rows


def measure(repetitions: int) -> tuple[str, list[dict[str, Any]]]:
    """Time the candidates' steps in this process, the only rank of an nccl group."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, timeout=timedelta(seconds=GROUP_TIMEOUT_S))
    try:
        rows = [row for name in WORKLOADS for row in measure_workload(name, repetitions)]
    finally:
        dist.destroy_process_group()
    lines = [
        f"**Steps, one rank, nccl**; {repetitions} repetitions",
        "",
        "| model | parameters | candidate | step, ms | host, ms | of native |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {WORKLOADS[row.workload].what} | {row.parameters} | {row.candidate} | {row.step_ms:.2f} |"
        f" {row.host_ms:.2f} | {row.ratio:.3f} |"
        for row in rows
    ]
    return "\n".join(lines), [asdict(row) for row in rows]


# ---- bits, two ranks on one GPU with gloo --------------------------------------------------------------------------


def digest_of(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def digests(rank: int) -> dict[str, dict[str, list[str]]]:
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
            torch.manual_seed(1 + rank)
            for _ in range(3):
                inputs, targets = workload.batch()
                model.zero_grad(set_to_none=True)
                F.cross_entropy(model(inputs), targets).backward()
            torch.cuda.synchronize()
            found[name][candidate] = [digest_of(p.grad) for p in model.parameters() if p.grad is not None]
            del model
    return found


def compare_bits(deadline_s: float) -> tuple[str, list[dict[str, Any]]]:
    """Compare every gradient of two ranks with native DDP's; nccl would refuse two ranks on one GPU."""
    first, second = run_ranks(digests, 2, deadline_s=deadline_s)
    rows = []
    for name, by_candidate in first.items():
        native = by_candidate["native"]
        for candidate, own in by_candidate.items():
            if candidate == "native":
                continue
            different = sum(a != b for a, b in zip(own, native, strict=True))
            between_ranks = sum(a != b for a, b in zip(own, second[name][candidate], strict=True))
            rows.append(
                {
                    "workload": name,
                    "candidate": candidate,
                    "gradients": len(own),
                    "other_bits_than_native": different,
                    "other_bits_than_rank_1": between_ranks,
                }
            )
    lines = [
        "**Gradients, two ranks on one GPU, gloo**; how many have other bits",
        "",
        "| model | candidate | gradients | than native's | than the other rank's |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {WORKLOADS[str(row['workload'])].what} | {row['candidate']} | {row['gradients']} |"
        f" {row['other_bits_than_native']} | {row['other_bits_than_rank_1']} |"
        for row in rows
    ]
    return "\n".join(lines), rows
