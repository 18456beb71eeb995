"""Memory for tensors that every rank of a host can map: anonymous files (memfd), cut into tensors."""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from typing import Any

import torch

from psengine.collectives.shared_memory.forked import keep_from_children

# The native side keeps a page of its own at the start of each segment.
HEADER_BYTES = 4096
ALIGNMENT_BYTES = 64
SMALLEST_SEGMENT_BYTES = 1024 * 1024


class SharedSegments:
    """Cuts tensors from segments; a segment is released with its last tensor.

    The machine provides pages when they are first written, so unused parts of a segment cost nothing.

    Args:
        extension: ``psengine._native``.
    """

    def __init__(self, extension: Any) -> None:
        self._extension = extension
        self._group: Any = None
        # Weak: nothing but its tensors keeps a segment.
        self._live: weakref.WeakKeyDictionary[mmap.mmap, _Segment] = weakref.WeakKeyDictionary()
        self._open_segment: weakref.ref[mmap.mmap] | None = None
        self._next_byte = 0
        self._lock = threading.Lock()

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised flat tensor.

        Raises:
            OSError, RuntimeError: the machine has no memory or file descriptor left to give.
        """
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        needed_bytes = numel * dtype.itemsize
        with self._lock:
            memory = self._open_segment() if self._open_segment is not None else None
            if memory is None or self._next_byte + needed_bytes > len(memory):
                memory = self._create_segment(needed_bytes)
            flat = torch.frombuffer(memory, dtype=dtype, count=numel, offset=self._next_byte)
            self._next_byte += -(-needed_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return flat

    def attach(self, group: Any) -> None:
        """Announce all segments, future ones too, to the ranks of ``group``, the native handle."""
        with self._lock:
            self._group = group
            for segment in list(self._live.values()):
                segment.attach(self._extension, group)

    def _create_segment(self, needed_bytes: int) -> mmap.mmap:
        # A segment costs a file descriptor, so each new one is as large as all that are in use together.
        live_bytes = sum(segment.size_bytes for segment in list(self._live.values()))
        segment = _Segment(HEADER_BYTES + max(needed_bytes, live_bytes, SMALLEST_SEGMENT_BYTES))
        try:
            memory = mmap.mmap(segment.file_descriptor, segment.size_bytes)
            segment.address = torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr()
            if self._group is not None:
                segment.attach(self._extension, self._group)
        except BaseException:
            segment.release()
            raise
        weakref.finalize(memory, segment.release).atexit = False
        keep_from_children(memory, segment.address, segment.file_descriptor)
        self._live[memory] = segment
        self._open_segment = weakref.ref(memory)
        self._next_byte = HEADER_BYTES
        return memory


class _Segment:
    """An anonymous file (memfd), which ends with the last process that has it open or mapped.

    The native side seals its size before other ranks hear of it: a file that shrank under its readers would kill them.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.address = 0
        self._release_from_group: Any = None
        self.file_descriptor = os.memfd_create("psengine-segment", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.file_descriptor, self.size_bytes)
        except BaseException:
            os.close(self.file_descriptor)
            raise

    def attach(self, extension: Any, group: Any) -> None:
        index = extension.shared_memory_adopt_segment(group, self.file_descriptor, self.size_bytes, self.address)
        self._release_from_group = lambda: extension.shared_memory_release_segment(group, index)

    def release(self) -> None:
        if self._release_from_group is not None:
            self._release_from_group()
        os.close(self.file_descriptor)
