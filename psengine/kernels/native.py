"""The native extension, where it was built and this torch can load it, and its operators."""

from __future__ import annotations

import functools
import importlib
import logging
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from psengine.environment.installation import BUILD_COMMAND

logger = logging.getLogger(__name__)

# setup.py, CUDA_ARCHITECTURES
OLDEST_CUDA_CAPABILITY = (7, 5)

extension: Any = None
reason = ""  # why it is None
# setup.py, REASON_FILE: why the build left the extension out.
_NOT_BUILT = Path(__file__).with_name("not_built.txt")
try:
    extension = importlib.import_module("psengine._native")
except ImportError as error:
    reason = " ".join(_NOT_BUILT.read_text(encoding="utf-8").split()) if _NOT_BUILT.exists() else str(error)
# csrc/bindings/library.cpp, kInterface
INTERFACE = 9
if extension is not None and getattr(extension, "interface", 1) != INTERFACE:
    extension, reason = None, "it was built from an earlier version of psengine"

_library = torch.library.Library("psengine", "IMPL") if extension is not None else None


def operator(name: str, fake: Callable[..., Any] = lambda *_, **__: None) -> Any:
    """The operator ``torch.ops.psengine.<name>``, with a fake implementation; None without the extension.

    Autograd has nothing to record: told so, it does not search each call's arguments for something to warn about.
    """
    if _library is None:
        return None
    _library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"psengine::{name}", fake)
    return getattr(torch.ops.psengine, name).default


@functools.cache
def runs_on(name: str, device: torch.device) -> bool:
    """Whether the operator has a kernel for this device: on CUDA, for GPUs of its oldest architecture and later."""
    key = {"cpu": "CPU", "cuda": "CUDA"}.get(device.type)
    if extension is None or key is None or not torch._C._dispatch_has_kernel_for_dispatch_key(f"psengine::{name}", key):
        return False
    return key != "CUDA" or torch.cuda.get_device_capability(device) >= OLDEST_CUDA_CAPABILITY


def has_shared_memory() -> bool:
    """Whether the extension offers the shared-memory collective, which is Linux's alone."""
    return hasattr(extension, "shared_memory_join")


@functools.cache
def say_if_missing() -> None:
    """Log once that plain torch is in use: a warning where the extension can be built."""
    if extension is None:
        can_be_built = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")
        logger.log(
            logging.WARNING if can_be_built else logging.INFO,
            "psengine runs without its native extension (%s): it is slower, and the codecs int8, fp4 and onebit are"
            " missing. Fix: %s, with a C++ compiler.",
            *(reason, BUILD_COMMAND),
        )
