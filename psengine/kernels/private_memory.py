"""Memory that processes share becomes one process's own, at the same addresses."""

from __future__ import annotations

import ctypes
import mmap

_MAP_FIXED = 0x10


def map_privately(address: int, size_bytes: int, descriptor: int) -> None:
    """Map a file's pages anew where they are mapped: from now on nobody sees what this process writes to them.

    Tensors there stay as they are. Nothing is copied: pages that are written to become this process's own.

    Raises:
        OSError: the system refuses.
    """
    library = ctypes.CDLL(None, use_errno=True)
    size, number = ctypes.c_size_t, ctypes.c_int
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, size, number, number, number, ctypes.c_long]
    access, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_FIXED
    if library.mmap(address, size_bytes, access, flags, descriptor, 0) != address:
        raise OSError(ctypes.get_errno(), "memory that processes share could not become this process's own")
