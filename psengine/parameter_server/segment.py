"""Memory that one process writes and others of its user read: memfd_create, opened by /proc/PROCESS/fd/DESCRIPTOR.

Its seals keep its size, so touching it never raises SIGBUS, and keep others from writing to it. Whoever made it holds a
lock on it until it lets go of it or dies, which readers can ask. A forked child has memory of its own instead.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import warnings
import weakref

import torch

from psengine.errors import ProtocolError
from psengine.kernels.private_memory import map_privately

with contextlib.suppress(ImportError):  # Windows has none, and shares nothing
    import fcntl

# From linux/fcntl.h: Python's module lacks them where it was built on another system.
_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_SEALS = 1 | 2 | 4  # F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW
_SEAL_FUTURE_WRITE = 16
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# Of what lies in it: a line of the cache.
ALIGNMENT_BYTES = 64

IS_AVAILABLE = sys.platform == "linux" and hasattr(os, "memfd_create")


def aligned(size_bytes: int) -> int:
    """The bytes that ``size_bytes`` take in a segment."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class Memory(mmap.mmap):
    """What tensors of a segment refer to: it stays mapped for as long as one of them lives.

    Attributes:
        keeps: lives as long.
    """

    keeps: object = None


class Segment:
    """Made here, or another process's.

    Args:
        descriptor: closed with this object.
        memory: mapped from it.

    Attributes:
        close: close the descriptor before this object's end.
    """

    def __init__(self, descriptor: int, memory: Memory) -> None:
        self.descriptor = descriptor
        self.memory = memory
        self.close = weakref.finalize(self, os.close, descriptor)
        self.close.atexit = False
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns, once, of memory that is not to be written to
            self._bytes = torch.frombuffer(memory, dtype=torch.uint8)

    @classmethod
    def make(cls, name: str, size_bytes: int) -> Segment:
        """New memory, zeros, of whole pages; only this mapping of it can be written to.

        Raises:
            OSError: the system has none (Linux before 5.1).
        """
        made = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            size_bytes = -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
            os.ftruncate(made, size_bytes)
            memory = Memory(made, size_bytes)
            fcntl.fcntl(made, _F_ADD_SEALS, _SEALS | _SEAL_FUTURE_WRITE)
            descriptor = _opened(made)
        finally:
            os.close(made)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        segment = cls(descriptor, memory)
        _made_here.add(segment)
        return segment

    @classmethod
    def of_process(cls, process: int, descriptor: int) -> Segment:
        """Memory that another process has made, to be read only.

        Raises:
            OSError, ValueError: there is no such descriptor, it is no memory, or it cannot be opened or mapped.
            ProtocolError: its size may change.
        """
        opened = _opened(descriptor, str(process))
        try:
            seals = fcntl.fcntl(opened, _F_GET_SEALS)
            if seals & _SEALS != _SEALS:
                raise ProtocolError(
                    "a segment must be sealed against a change of its size (expected F_SEAL_SEAL, F_SEAL_SHRINK and"
                    f" F_SEAL_GROW, {_SEALS}, got {seals})"
                )
            memory = Memory(opened, 0, access=mmap.ACCESS_READ)
        except BaseException:
            os.close(opened)
            raise
        return cls(opened, memory)

    def tensor(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """1-D, of the memory from ``offset``; all share one storage.

        Raises:
            ProtocolError: it is not within the memory, or not aligned to its elements.
        """
        end = offset + numel * dtype.itemsize
        if end > len(self._bytes) or offset % dtype.itemsize:
            raise ProtocolError(
                f"a payload in shared memory lies outside it, or between elements (expected an end of at most"
                f" {len(self._bytes)} and a multiple of {dtype.itemsize}, got {end} and {offset})"
            )
        return self._bytes[offset:end].view(dtype)

    def offset_of(self, values: torch.Tensor) -> int | None:
        """Where these contiguous values begin; None where they are other memory."""
        offset = values.data_ptr() - self._bytes.data_ptr()
        return offset if 0 <= offset <= len(self._bytes) - values.nbytes else None

    @property
    def is_held(self) -> bool:
        """Whether another process, which has made it, still lives and holds it."""
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False

    @property
    def mark(self) -> int:
        """Its first eight bytes."""
        return int.from_bytes(self.memory[:8], "little")

    def make_private(self) -> None:
        """From now on nobody sees what this process writes to its memory; see ``map_privately``."""
        if not self.close.alive:
            return  # a forked child's
        opened = _opened(self.descriptor)
        try:
            map_privately(self._bytes.data_ptr(), len(self._bytes), opened)
        finally:
            os.close(opened)


def _opened(descriptor: int, process: str = "self") -> int:
    """A descriptor of the same memory, with locks of its own: a mapping would keep those of what it is made from."""
    return os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)


_made_here: weakref.WeakSet[Segment] = weakref.WeakSet()


def _share_nothing() -> None:
    for segment in list(_made_here):
        segment.make_private()
        segment.close()


if IS_AVAILABLE:
    os.register_at_fork(after_in_child=_share_nothing)
