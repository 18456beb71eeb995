"""Which backends torch.distributed has; and a trial: two processes sum a tensor, over gloo and in shared memory."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from psengine.cli.doctor_checks.findings import Circumstances, Finding, note, ok, problem, warning

# An interpreter that imports torch, on a busy machine; and what its two processes wait for each other.
START_S, MEETING_TIMEOUT_S = 25.0, 10.0
LARGE_BYTES, SMALL_BYTES = 4 << 20, 4096
# Slower than this and something is wrong with the machine, not just with the transport.
SLOW_BYTES_PER_S = {"gloo": 0.05e9, "shared_memory": 0.2e9}


def backends(circumstances: Circumstances) -> Iterator[Finding]:
    """What torch.distributed can exchange over."""
    if not dist.is_available():
        yield problem("this torch is built without torch.distributed", "install a torch from https://pytorch.org")
        return
    named = [name for name in dist.Backend.backend_list if name not in ("undefined", "fake", "psengine")]
    available = [name for name in named if dist.is_backend_available(name)]
    has_gpu = torch.cuda.is_available()
    text = f"torch.distributed has {', '.join(available) or 'no backend'}"
    if "nccl" in available and torch.cuda.is_available():
        text += f" (nccl {'.'.join(map(str, torch.cuda.nccl.version()))})"
    if has_gpu and "nccl" not in available:
        fix = "install a torch with NCCL, which is Linux's"
        yield warning(f"{text}: GPUs exchange over gloo, through host memory", fix, available=available)
    elif "gloo" not in available:
        yield warning(f"{text}: no backend for CPU tensors", "install a torch with gloo", available=available)
    elif not has_gpu and "nccl" in available:
        yield ok(f"{text}; nccl needs a GPU, so gloo it will be", available=available)
    else:
        yield ok(text, available=available)


def exchange(circumstances: Circumstances) -> Iterator[Finding]:
    """Two processes meet here and sum 4 KiB and 4 MiB, over gloo and in shared memory."""
    try:
        results = _try_exchange(circumstances)
    except (OSError, RuntimeError, ValueError) as error:
        yield problem(
            f"two processes could not try an all-reduce: {error}", "see what the other checks found, above all hostname"
        )
        return
    for transport, result in results.items():
        yield _judge(transport, result, circumstances)


def _judge(transport: str, result: Mapping[str, Any], circumstances: Circumstances) -> Finding:
    name = {"gloo": "gloo", "shared_memory": "shared memory"}[transport]
    if "error" in result:
        text = f"an all-reduce between two processes over {name} failed: {result['error']}"
        if transport == "gloo":
            return problem(text, "set GLOO_SOCKET_IFNAME to an interface that is up (lo will do on one host)")
        return note(text, "see native-extension and memory-sharing; until then ranks exchange over gloo")
    small_s, large_s = result["seconds"][str(SMALL_BYTES)], result["seconds"][str(LARGE_BYTES)]
    speed = LARGE_BYTES / large_s
    text = f"two processes over {name}: 4 KiB in {small_s * 1e6:.0f} µs, 4 MiB in {large_s * 1e3:.2f} ms"
    text += f" ({speed / 1e9:.2f} GB/s)"
    model_bytes = circumstances.model_bytes
    if model_bytes is not None:
        text += f"; {model_bytes / 1e6:g} MB of gradients: {model_bytes / speed * 1e3:.0f} ms a step"
    facts = {"transport": transport, "small_s": small_s, "large_s": large_s, "bytes_per_s": speed}
    if speed < SLOW_BYTES_PER_S[transport]:
        return warning(f"{text}: slow", "end other programs, or give this container whole cores", **facts)
    return ok(text, **facts)


def _try_exchange(circumstances: Circumstances) -> dict[str, Any]:
    """What the two processes saw, by transport.

    Raises:
        OSError, RuntimeError, ValueError: they could not be started, died, hung, or printed something else.
    """
    arguments = [sys.executable, "-m", "psengine.cli.doctor_checks.exchange_ranks", f"{MEETING_TIMEOUT_S:g}"]
    with subprocess.Popen(
        arguments,
        env={**circumstances.variables, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=START_S + MEETING_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"they had not finished after {START_S + MEETING_TIMEOUT_S:g} s") from None
        finally:
            # Both of them, also where only the one that answers to us has ended.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode != 0 or not out.strip():
        last = (err.strip().splitlines() or ["they said nothing"])[-1]
        raise RuntimeError(f"they ended with exit code {process.returncode}: {last[:300]}")
    found: dict[str, Any] = json.loads(out)
    return found
