"""Versions, optional packages, the native extension, CUDA."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata

import torch

from psengine.cli.doctor_checks.findings import Circumstances, Finding, note, ok, problem, read_text, warning
from psengine.environment import installation
from psengine.kernels import native, ops

OLDEST_TORCH = (2, 11)
# As in pyproject.toml: extra -> package -> oldest version. What developers need is not here.
EXTRAS: dict[str, dict[str, str]] = {
    "server": {
        "pyzmq": "26",
        "msgpack": "1.0",
        "safetensors": "0.4",
        "numpy": "1.26",
        "xxhash": "3.0",
        "typer": "0.16",
        "prometheus-client": "0.20",
    },
    "cli": {"typer": "0.16", "rich": "13"},
    "integrations": {"lightning": "2.4", "accelerate": "1.0", "transformers": "4.46"},
    "examples": {"matplotlib": "3.8", "scikit-learn": "1.4", "tqdm": "4.66"},
}
NVIDIA_SMI_TIMEOUT_S = 8.0


def versions(circumstances: Circumstances) -> Iterator[Finding]:
    """Python, torch and psengine, and where they come from."""
    from psengine.version import __version__

    found = {"python": platform.python_version(), "torch": torch.__version__, "psengine": __version__}
    text = f"psengine {__version__}, torch {torch.__version__}, Python {found['python']} on {platform.platform()}"
    if _numbers(torch.__version__) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        yield problem(
            f"{text}; this torch is too old (expected {oldest} or newer)", f"pip install 'torch>={oldest}'", **found
        )
    else:
        yield ok(text, **found, executable=sys.executable)


def installed(circumstances: Circumstances) -> Iterator[Finding]:
    """Where this copy of psengine is from, and whether another project's package of that name is installed too."""
    yield ok(f"{installation.DISTRIBUTION} is {installation.origin()}", distribution=installation.DISTRIBUTION)
    uninstall = f"pip uninstall --yes {installation.OTHER_DISTRIBUTION}, then {installation.reinstall_command()}"
    for other, is_ours in installation.other_distributions():
        if is_ours:
            yield warning(f"{other} is an older installation of this package, under its former name", uninstall)
        else:
            yield problem(
                f"{other} is another project's: both have a package psengine, and of two files with one name the last"
                " that was installed is left",
                f"{uninstall}; who needs that project too gives it an environment of its own",
            )


def packages(circumstances: Circumstances) -> Iterator[Finding]:
    """The optional packages, and which extra brings them."""
    for extra, wanted in EXTRAS.items():
        have = {name: version for name in wanted if (version := _version_of(name)) is not None}
        missing = [name for name in wanted if name not in have]
        old = [f"{name} {have[name]}" for name in have if _numbers(have[name]) < _numbers(wanted[name])]
        install = installation.install_command(extra, upgrade=True)
        facts = {"extra": extra, "installed": have, "missing": missing}
        listed = ", ".join(f"{name} {version}" for name, version in have.items()) or "none of its packages"
        if old:
            yield warning(f"extra {extra}: too old: {', '.join(old)}", install, **facts)
        elif missing:
            yield note(f"extra {extra}: {listed}; without {', '.join(missing)}", install, **facts)
        else:
            yield ok(f"extra {extra}: {listed}", **facts)


def native_extension(circumstances: Circumstances) -> Iterator[Finding]:
    """Whether the C++ kernels and the shared-memory collective are there, and for which processor."""
    build = f"{installation.build_command()}, with a C++ compiler"
    if native.extension is None:
        compiler = next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), None)
        yield warning(
            f"the native extension is not loaded ({native._reason or 'no reason given'}): kernels are plain torch, and"
            " ranks of one host exchange over gloo instead of shared memory",
            build + ("" if compiler else " (none is installed here: apt install g++)"),
            loaded=False,
            compiler=compiler,
        )
        return
    kernels = ops.native_kernels()
    facts = {"loaded": True, "kernels": kernels, "shared_memory": native.has_shared_memory()}
    text = f"the native extension is loaded, with {kernels} kernels"
    flags = set(re.findall(r"^flags\s*:(.*)$", read_text("/proc/cpuinfo"), re.MULTILINE)[:1] or [""])
    processor = set(" ".join(flags).split())
    if kernels == "baseline" and "avx2" in processor:
        yield note(f"{text}, though this processor has AVX2", "build it again on this machine: " + build, **facts)
    else:
        yield ok(text, **facts)
    if not native.has_shared_memory():
        yield warning("it has no shared-memory collective, which is Linux's alone", "use Linux, or gloo", **facts)
    if torch.cuda.is_available() and not torch._C._dispatch_has_kernel_for_dispatch_key("psengine::pack_", "CUDA"):
        yield note(
            "it was built without CUDA kernels: gradients on the GPU are packed by plain torch",
            "PSENGINE_CUDA=1 " + build + " and nvcc",
        )


def cuda(circumstances: Circumstances) -> Iterator[Finding]:
    """GPUs, the driver, and whether this torch can use them."""
    cards, driver_error = _nvidia_smi()
    built_for = torch.version.cuda
    hidden = circumstances.variables.get("CUDA_VISIBLE_DEVICES")
    facts = {"built_for": built_for, "cards": cards, "visible": hidden}
    if hidden is not None and hidden.strip() in ("", "-1"):
        yield note(
            f"CUDA_VISIBLE_DEVICES={hidden!r} hides every GPU: training runs on the CPU",
            "unset CUDA_VISIBLE_DEVICES to use GPUs",
            **facts,
        )
        return
    if built_for is None:
        if cards:
            yield problem(
                f"there are GPUs ({'; '.join(cards)}), and this torch ({torch.__version__}) is built without CUDA",
                "install a CUDA build of torch: https://pytorch.org/get-started/locally",
                **facts,
            )
        else:
            yield ok("no GPU, and a torch without CUDA: training runs on the CPU, over gloo or shared memory", **facts)
        return
    if not torch.cuda.is_available():
        if cards or driver_error:
            yield problem(
                f"torch is built for CUDA {built_for} and cannot use the GPUs"
                f" ({'; '.join(cards) or driver_error}): the driver is older than this CUDA, or the container lacks it",
                "update the NVIDIA driver, install a torch for the driver's CUDA, or start the container with --gpus"
                " all",
                **facts,
            )
        else:
            yield ok(f"torch is built for CUDA {built_for}, and there is no GPU: training runs on the CPU", **facts)
        return
    for index in range(torch.cuda.device_count()):
        yield _device(index)


def _device(index: int) -> Finding:
    free_bytes, total_bytes = torch.cuda.mem_get_info(index)
    capability = torch.cuda.get_device_capability(index)
    name = torch.cuda.get_device_name(index)
    text = (
        f"cuda:{index} is {name}, capability {capability[0]}.{capability[1]}, {free_bytes / 2**30:.1f} of"
        f" {total_bytes / 2**30:.1f} GiB free"
    )
    architectures = torch.cuda.get_arch_list()
    newest = max((_numbers(a.rpartition("_")[2].rstrip("af"))[0] for a in architectures), default=0)
    if architectures and newest < capability[0] * 10:
        return problem(
            f"{text}; this torch has no kernels for it (it has {', '.join(architectures)})",
            "install a torch built for this GPU: https://pytorch.org/get-started/locally",
        )
    if free_bytes < total_bytes // 10:
        return warning(f"{text}: somebody else uses it", "nvidia-smi names the processes")
    return ok(text, name=name, capability=list(capability), total_bytes=total_bytes, free_bytes=free_bytes)


def _nvidia_smi() -> tuple[list[str], str]:
    """What the driver lists, whatever torch thinks of it; and why it lists nothing, where it is installed."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return [], ""
    arguments = [command, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], f"nvidia-smi failed: {error}"
    if done.returncode != 0:
        return [], f"nvidia-smi failed: {(done.stdout + done.stderr).strip()[:200]}"
    return [f"{line.strip()} (driver)" if "," not in line else line.strip() for line in done.stdout.splitlines()], ""


def _version_of(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])
