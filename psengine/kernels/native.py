"""The native extension, where it was built and this torch can load it."""

from __future__ import annotations

import functools
import importlib
import logging
import platform
import sys
from pathlib import Path
from typing import Any

import torch  # noqa: F401 - the extension links against torch's libraries, which this import loads

from psengine.environment.installation import BUILD_COMMAND

logger = logging.getLogger(__name__)

extension: Any = None
_reason = ""
# setup.py, REASON_FILE: why the build left the extension out.
_NOT_BUILT = Path(__file__).with_name("not_built.txt")
try:
    extension = importlib.import_module("psengine._native")
except ImportError as error:
    _reason = " ".join(_NOT_BUILT.read_text(encoding="utf-8").split()) if _NOT_BUILT.exists() else str(error)
# csrc/bindings/library.cpp, kInterface
INTERFACE = 6
if extension is not None and getattr(extension, "interface", 1) != INTERFACE:
    extension, _reason = None, "it was built from an earlier version of psengine"


def has_shared_memory() -> bool:
    """Whether the extension offers the shared-memory collective, which is Linux's alone."""
    return hasattr(extension, "shared_memory_join")


@functools.cache
def say_if_missing() -> None:
    """Log once that the slower references are in use, and the fix: a warning where the extension can be built."""
    if extension is None:
        can_be_built = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")
        logger.log(
            logging.WARNING if can_be_built else logging.INFO,
            "psengine runs without its native extension (%s): bucket kernels are plain torch, and ranks of one host"
            " exchange over torch.distributed. Fix: %s, with a C++ compiler.",
            _reason,
            BUILD_COMMAND,
        )
