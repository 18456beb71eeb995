"""Versions, the installation, the native extension, CUDA."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from collections.abc import Iterator

import torch

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
    oldest = ".".join(map(str, OLDEST_TORCH))
    if tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < OLDEST_TORCH:
        yield problem(
            f"{text}; torch is too old (expected {oldest} or newer)", f"pip install 'torch>={oldest}'", **found
        )
    else:
        yield ok(text, **found)


def installed(context: CheckContext) -> Iterator[Finding]:
    """Where this copy of psengine is from, and whether another project's package of that name is installed too."""
    yield ok(f"{installation.DISTRIBUTION} is {installation.origin()}")
    uninstall = f"pip uninstall --yes {installation.OTHER_DISTRIBUTION}, then {installation.reinstall_command()}"
    for other, is_ours in installation.other_distributions():
        if is_ours:
            yield warning(f"{other} is an older installation of this package, under its former name", uninstall)
        else:
            yield problem(
                f"{other} is another project's: both have a package psengine, and the one installed last overwrites"
                " files of the other",
                f"{uninstall}; install that project into an environment of its own",
            )


def native_extension(context: CheckContext) -> Iterator[Finding]:
    """Whether the C++ kernels and the shared-memory collective are there."""
    build = f"{installation.build_command()}, with a C++ compiler"
    if native.extension is None:
        yield warning(
            f"the native extension is not loaded ({native._reason or 'no reason given'}): kernels are plain torch, and"
            " ranks of one host exchange over gloo instead of shared memory",
            build,
        )
        return
    yield ok(f"the native extension is loaded, with {ops.native_kernels()} kernels")
    if not native.has_shared_memory():
        yield warning("the native extension has no shared-memory collective", "use Linux, or gloo")


def cuda(context: CheckContext) -> Iterator[Finding]:
    """GPUs, the driver, and whether this torch can use them."""
    cards = _nvidia_smi()
    built_for = torch.version.cuda
    hidden = context.variables.get("CUDA_VISIBLE_DEVICES")
    if cards and hidden is not None and hidden.strip() in ("", "-1"):
        yield warning(
            f"CUDA_VISIBLE_DEVICES={hidden!r} hides every GPU: training runs on the CPU", "unset CUDA_VISIBLE_DEVICES"
        )
    elif cards and built_for is None:
        yield problem(
            f"there are GPUs ({'; '.join(cards)}), and torch {torch.__version__} is built without CUDA", GET_TORCH
        )
    elif cards and not torch.cuda.is_available():
        yield problem(
            f"torch is built for CUDA {built_for} and cannot use the GPUs ({'; '.join(cards)}): the driver is older"
            " than this CUDA, or the container has no access",
            f"update the NVIDIA driver, start the container with --gpus all, or {GET_TORCH}",
        )
    elif not torch.cuda.is_available():
        yield ok(f"no GPU; torch is built {f'for CUDA {built_for}' if built_for else 'without CUDA'}")
    else:
        for index in range(torch.cuda.device_count()):
            yield _device(index)


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


def _nvidia_smi() -> list[str]:
    """The GPUs that the driver lists, whether or not torch can use them."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    arguments = [command, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"nvidia-smi failed: {error}"]
    if done.returncode != 0:
        return [f"nvidia-smi failed: {(done.stdout + done.stderr).strip()[:200]}"]
    return [line.strip() for line in done.stdout.splitlines()]
