"""Memory that ranks share becomes private to a forked child: what the child writes, no rank sees.

A child inherits its parent's mappings. One that steps, zeroes gradients or runs a backward would write into buckets and
parameters of ranks that train. Its pages are mapped anew at the same addresses, so its tensors stay as they are: it
sees the ranks' values, until it writes to a page.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

_MAP_FIXED = 0x10
# By mapping: its address, size and file descriptor.
_mappings: weakref.WeakKeyDictionary[mmap.mmap, tuple[int, int, int]] = weakref.WeakKeyDictionary()


def keep_from_children(memory: mmap.mmap, address: int, file_descriptor: int) -> None:
    """Let children that are forked from now on have ``memory`` for themselves.

    Args:
        memory: a shared mapping of a whole file.
        address: where it begins.
        file_descriptor: of the file; stays open as long as the mapping.
    """
    _mappings[memory] = (address, len(memory), file_descriptor)


def _map_privately() -> None:
    if not _mappings:
        return
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    access, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_FIXED
    for address, size_bytes, file_descriptor in list(_mappings.values()):
        if library.mmap(address, size_bytes, access, flags, file_descriptor, 0) != address:
            raise OSError(ctypes.get_errno(), "a forked child could not get its own copy of memory that ranks share")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_map_privately)
