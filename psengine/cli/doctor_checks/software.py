"""Versions, the installation, the native extension, CUDA."""

from __future__ import annotations

import platform
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import torch

import psengine
from psengine.cli.doctor_checks.findings import CheckContext, Finding, ok, problem, warning
from psengine.environment import installation
from psengine.kernels import native, ops
from psengine.version import __version__

OLDEST_TORCH = (2, 11)
NVIDIA_SMI_TIMEOUT_S = 8.0
GET_TORCH = "install a torch for this GPU and driver: https://pytorch.org/get-started/locally"


def versions(context: CheckContext) -> Iterator[Finding]:
    """psengine, torch and Python."""
    found = {"python": platform.python_version(), "torch": torch.__version__, "psengine": __version__}
    text = f"psengine {__version__}, torch {torch.__version__}, Python {found['python']} on {platform.platform()}"
    if tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) >= OLDEST_TORCH:
        yield ok(text, **found)
    else:
        oldest = ".".join(map(str, OLDEST_TORCH))
        fix = f"pip install 'torch>={oldest}'"
        yield problem(f"{text}; torch is too old (expected {oldest} or newer)", fix, **found)


def installed(context: CheckContext) -> Iterator[Finding]:
    """Where this copy of psengine is, and whether another project's package of that name is installed too."""
    yield ok(f"{installation.DISTRIBUTION} is in {Path(psengine.__file__).parent}")
    for other in installation.other_distributions():
        yield problem(
            f"{other} is another project's: both have a package psengine, and the one installed last overwrites"
            " files of the other",
            f"pip uninstall --yes {installation.OTHER_DISTRIBUTION}, then {installation.build_command()};"
            " install that project into an environment of its own",
        )


def native_extension(context: CheckContext) -> Iterator[Finding]:
    """Whether the C++ kernels and the shared-memory collective are there."""
    if native.extension is None:
        yield warning(
            f"the native extension is not loaded ({native._reason or 'no reason given'}): kernels are plain torch, and"
            " ranks of one host exchange over gloo instead of shared memory",
            f"{installation.build_command()}, with a C++ compiler",
        )
        return
    yield ok(f"the native extension is loaded, with {ops.native_kernels()} kernels")
    if not native.has_shared_memory():
        yield warning("the native extension has no shared-memory collective", "use Linux, or gloo")


def cuda(context: CheckContext) -> Iterator[Finding]:
    """GPUs, the driver, and whether this torch can use them."""
    cards = _nvidia_smi()
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    hidden = context.variables.get("CUDA_VISIBLE_DEVICES", "all").strip()
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            yield _device(index)
    elif not cards:
        yield ok(f"no GPU; torch is {built}")
    elif hidden in ("", "-1"):
        yield warning(
            f"CUDA_VISIBLE_DEVICES={hidden!r} hides every GPU: training runs on the CPU", "unset CUDA_VISIBLE_DEVICES"
        )
    elif torch.version.cuda is None:
        yield problem(f"there are GPUs ({cards}), and torch {torch.__version__} is {built}", GET_TORCH)
    else:
        yield problem(
            f"torch is {built} and cannot use the GPUs ({cards}): the driver is older than this CUDA, or the container"
            " has no access",
            f"update the NVIDIA driver, start the container with --gpus all, or {GET_TORCH}",
        )


def _device(index: int) -> Finding:
    free_bytes, total_bytes = torch.cuda.mem_get_info(index)
    major, minor = torch.cuda.get_device_capability(index)
    text = (
        f"cuda:{index} is {torch.cuda.get_device_name(index)}, capability {major}.{minor},"
        f" {free_bytes / 2**30:.1f} of {total_bytes / 2**30:.1f} GiB free"
    )
    architectures = torch.cuda.get_arch_list()
    newest = max((int(number) for name in architectures for number in re.findall(r"\d+", name)), default=0)
    if architectures and newest < major * 10:
        return problem(f"{text}; this torch has no kernels for it (it has {', '.join(architectures)})", GET_TORCH)
    if free_bytes < total_bytes // 10:
        return warning(f"{text}: another process uses it", "nvidia-smi names the processes")
    return ok(text, total_bytes=total_bytes, free_bytes=free_bytes)


def _nvidia_smi() -> str:
    """The GPUs that the driver lists, whether or not torch can use them; "" where there is no driver."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "" if isinstance(error, FileNotFoundError) else f"nvidia-smi failed: {error}"
    printed = "; ".join((done.stdout + done.stderr).strip().splitlines())
    return printed if done.returncode == 0 else f"nvidia-smi failed: {printed[:200]}"
