"""Memory behind a file descriptor, sealed so that neither end can change its size: touching it never raises SIGBUS."""

from __future__ import annotations

import ctypes
import mmap
import os
import stat
import struct
import sys
import warnings
import weakref
from pathlib import Path
from typing import Any

import torch

from psengine.errors import ProtocolError

# From linux/fcntl.h and linux/magic.h: Python's modules lack them where it was built on another system.
_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW, _SEAL_FUTURE_WRITE = 1, 2, 4, 16
_SEALS = _SEAL_SEAL | _SEAL_SHRINK | _SEAL_GROW
_TMPFS_MAGIC = 0x01021994
_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2
_MAP_FIXED = 16
_MAP_FAILED = ctypes.c_void_p(-1).value
OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

IS_AVAILABLE = sys.platform == "linux" and hasattr(os, "memfd_create")


def machine_memory_bytes() -> int:
    """What this machine, or the container, has."""
    limits = [PAGE_BYTES * os.sysconf("SC_PHYS_PAGES")]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limits.append(int(Path(path).read_text()))
        except (OSError, ValueError):
            continue  # absent, or "max"
    return min(limits)


def resident_bytes() -> int:
    """Resident memory of this process alone, without what it shares with others; 0 where the system does not say."""
    try:
        _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
        return (resident - shared) * PAGE_BYTES
    except (OSError, ValueError):
        return 0


def make_segment(size_bytes: int) -> int:
    """The descriptor of new sealed memory, of whole pages; the caller closes it.

    Raises:
        OSError: the system has none.
    """
    return _make("psengine-worker", size_bytes, is_lent=False)[0]


def make_lent_segment(size_bytes: int) -> tuple[int, SegmentMapping]:
    """New sealed memory, of whole pages, that only this process can write to, and only by this mapping.

    The caller closes the descriptor.

    Raises:
        OSError: the system has none (Linux before 5.1).
        ProtocolError: it cannot be mapped.
    """
    return _make("psengine-server", size_bytes, is_lent=True)


def _make(name: str, size_bytes: int, *, is_lent: bool) -> tuple[int, Any]:
    import fcntl  # Windows has none, and imports this module

    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        size_bytes = -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
        os.ftruncate(descriptor, size_bytes)
        if _may_run_out():
            os.posix_fallocate(descriptor, 0, size_bytes)
        mapping = SegmentMapping(descriptor, size_bytes) if is_lent else None
        fcntl.fcntl(descriptor, _F_ADD_SEALS, _SEALS | (_SEAL_FUTURE_WRITE if is_lent else 0))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, mapping


def _may_run_out() -> bool:
    """Whether a page of memory may be missing when it is touched, which ends the process (SIGBUS): under strict
    overcommit. Then pages are taken at once, and a lack of them is an OSError.
    """
    try:
        return OVERCOMMIT.read_text().strip() == "2"
    except OSError:
        return False


def check_segment(descriptor: int, size_bytes: int, most_bytes: int) -> None:
    """Raise ProtocolError unless ``descriptor`` is memory of this size whose size cannot change.

    Args:
        descriptor: as a peer passed it on.
        size_bytes: as the peer says.
        most_bytes: how large it may be.
    """
    import fcntl  # as above

    try:
        seals = fcntl.fcntl(descriptor, _F_GET_SEALS)
    except OSError:
        raise ProtocolError("a segment is memory of memfd_create (expected one, got another kind of file)") from None
    if seals & _SEALS != _SEALS:
        raise ProtocolError(
            "a segment must be sealed against a change of its size (expected F_SEAL_SEAL, F_SEAL_SHRINK and"
            f" F_SEAL_GROW, {_SEALS}, got {seals})"
        )
    status = os.fstat(descriptor)
    # Pages of hugetlbfs may be missing when they are touched.
    if not stat.S_ISREG(status.st_mode) or _file_system(descriptor) != _TMPFS_MAGIC:
        raise ProtocolError("a segment is memory of ordinary pages (expected tmpfs, got another file system)")
    if status.st_size != size_bytes:
        raise ProtocolError(
            f"a segment of another size (expected {size_bytes} bytes by its offer, got {status.st_size})"
        )
    if size_bytes > most_bytes:
        raise ProtocolError(f"a segment is too large (expected at most {most_bytes} bytes, got {size_bytes})")


def _file_system(descriptor: int) -> int:
    buffer = ctypes.create_string_buffer(256)  # struct statfs has 120 bytes, of which the first long is the type
    return 0 if _libc.fstatfs(descriptor, buffer) else int(struct.unpack_from("l", buffer)[0])


class SegmentMapping:
    """A segment in this process's address space. It stays mapped for as long as a tensor of it lives.

    Args:
        descriptor: may be closed afterwards.
        size_bytes: of the segment, which was checked.
        is_written: whether this process writes to it; else tensors of it must only be read.

    Raises:
        ProtocolError: it cannot be mapped (a seal against writing, or no address space).
    """

    def __init__(self, descriptor: int, size_bytes: int, *, is_written: bool = True) -> None:
        access = mmap.ACCESS_WRITE if is_written else mmap.ACCESS_READ
        try:
            self.memory = mmap.mmap(descriptor, size_bytes, access=access)
        except (OSError, ValueError) as error:
            raise ProtocolError(
                f"a segment could not be mapped (expected memory to read and write, got: {error})"
            ) from None
        self.size_bytes = size_bytes
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns, once, of memory that is not to be written to
            self.address = torch.frombuffer(self.memory, dtype=torch.uint8).data_ptr()

    def tensor(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """1-D, of the memory from ``offset``."""
        return torch.frombuffer(self.memory, dtype=dtype, count=numel, offset=offset)

    def keep_from_children(self, descriptor: int) -> None:
        """Nobody sees what children that are forked from now on write to it; their tensors stay as they are.

        Args:
            descriptor: of the segment; it is closed with the mapping.
        """
        weakref.finalize(self.memory, os.close, descriptor).atexit = False
        _kept_from_children[self.memory] = (self.address, self.size_bytes, descriptor)

    def detach(self) -> None:
        """Give this process private memory with the same content at the same addresses: tensors stay as they are.

        Other processes keep the segment as it is now. Nothing may be written to it meanwhile.
        """
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        private = _libc.mmap(None, self.size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        if private == _MAP_FAILED:
            raise OSError(ctypes.get_errno(), "mmap")
        ctypes.memmove(private, self.address, self.size_bytes)
        # The pages move over the segment's in one step, so that no reader finds them missing.
        flags = _MREMAP_MAYMOVE | _MREMAP_FIXED
        if _libc.mremap(private, self.size_bytes, self.size_bytes, flags, self.address) != self.address:
            raise OSError(ctypes.get_errno(), "mremap")
        _kept_from_children.pop(self.memory, None)


def _c_library() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.mremap.restype = library.mmap.restype = address
    library.mremap.argtypes = [address, size, size, number, address]
    library.mmap.argtypes = [address, size, number, number, number, ctypes.c_long]
    library.fstatfs.argtypes = [ctypes.c_int, ctypes.c_char_p]
    return library


# By mapping: its address, its size and the descriptor of its segment.
_kept_from_children: weakref.WeakKeyDictionary[mmap.mmap, tuple[int, int, int]] = weakref.WeakKeyDictionary()


def _map_privately() -> None:
    # Nothing is copied: pages that the child writes to become its own.
    access, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_FIXED
    for address, size_bytes, descriptor in list(_kept_from_children.values()):
        if _libc.mmap(address, size_bytes, access, flags, descriptor, 0) != address:
            raise OSError(ctypes.get_errno(), "a forked child could not get its own copy of memory shared with servers")
    _kept_from_children.clear()  # its own children get what is its own now


_libc = _c_library() if IS_AVAILABLE else ctypes.CDLL(None)
if IS_AVAILABLE:
    os.register_at_fork(after_in_child=_map_privately)
