"""The native extension, where it was built and this torch can load it."""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch  # noqa: F401 - the extension links against torch's libraries, which this import loads

from psengine.environment.installation import build_command

logger = logging.getLogger(__name__)

extension: Any = None
_reason = ""
try:
    from psengine import _native as extension  # type: ignore[no-redef]
except ImportError as error:
    _reason = str(error)
# csrc/bindings/library.cpp, kInterface
INTERFACE = 2
if extension is not None and getattr(extension, "interface", 1) != INTERFACE:
    extension, _reason = None, "it was built from an earlier version of psengine"


def has_shared_memory() -> bool:
    """Whether the extension offers the shared-memory collective, which is Linux's alone."""
    return hasattr(extension, "shared_memory_join")


@functools.cache
def say_if_missing() -> None:
    """Log once, at info level, that the slower references are in use, and how to change it."""
    if extension is None:
        logger.info(
            "psengine runs without its native extension (%s): bucket kernels are plain torch, and ranks of one host"
            " exchange over torch.distributed. To build it: %s, with a C++ compiler.",
            _reason,
            build_command(),
        )
