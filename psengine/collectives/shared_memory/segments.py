"""Memory for tensors that every rank of a host can map: anonymous files, cut into tensors."""

from __future__ import annotations

import mmap
import threading
import weakref
from typing import Any

import torch

from psengine.collectives.shared_memory.files import address_of, make_file, map_file
from psengine.kernels import native

# The native side keeps a page of its own at the start of each segment.
HEADER_BYTES = 4096
ALIGNMENT_BYTES = 64
SMALLEST_SEGMENT_BYTES = 1024 * 1024


class SharedSegments:
    """Cuts tensors from segments; a segment is released with its last tensor.

    The machine provides pages when they are first written, so unused parts of a segment cost nothing.
    """

    def __init__(self) -> None:
        self._group: Any = None
        # By segment, the descriptor of its file. Weak: nothing but its tensors keeps a segment.
        self._live: weakref.WeakKeyDictionary[mmap.mmap, int] = weakref.WeakKeyDictionary()
        self._open_segment: weakref.ref[mmap.mmap] | None = None
        self._next_byte = 0
        self._lock = threading.Lock()

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an uninitialised flat tensor; of ordinary memory where ``device`` or this machine has no other.

        Raises:
            OSError, RuntimeError: the machine has no memory or file descriptor left to give.
        """
        if numel == 0 or device.type != "cpu" or not native.has_shared_memory():
            return torch.empty(numel, dtype=dtype, device=device)
        needed_bytes = numel * dtype.itemsize
        with self._lock:
            memory = self._open_segment() if self._open_segment is not None else None
            if memory is None or self._next_byte + needed_bytes > len(memory):
                memory = self._make_segment(needed_bytes)
            flat = torch.frombuffer(memory, dtype=dtype, count=numel, offset=self._next_byte)
            self._next_byte += -(-needed_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return flat

    def attach(self, group: Any) -> None:
        """Announce all segments, future ones too, to the ranks of ``group``, the native handle."""
        with self._lock:
            self._group = group
            for memory, descriptor in list(self._live.items()):
                self._announce(memory, descriptor)

    def _make_segment(self, needed_bytes: int) -> mmap.mmap:
        # A segment costs a file descriptor, so each new one is as large as all that are in use together.
        live_bytes = sum(map(len, list(self._live)))
        size_bytes = HEADER_BYTES + max(needed_bytes, live_bytes, SMALLEST_SEGMENT_BYTES)
        size_bytes = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        descriptor = make_file("segment", size_bytes)
        memory = map_file(descriptor, size_bytes)
        if self._group is not None:
            self._announce(memory, descriptor)
        self._live[memory] = descriptor
        self._open_segment = weakref.ref(memory)
        self._next_byte = HEADER_BYTES
        return memory

    def _announce(self, memory: mmap.mmap, descriptor: int) -> None:
        native_side, group = native.extension, self._group
        index = native_side.shared_memory_adopt_segment(group, descriptor, len(memory), address_of(memory))
        weakref.finalize(memory, native_side.shared_memory_release_segment, group, index).atexit = False
