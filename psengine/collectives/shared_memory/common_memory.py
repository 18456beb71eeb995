"""One piece of memory that all ranks of a host map and may write: an anonymous file (memfd) that rank 0 makes."""

from __future__ import annotations

import mmap
import os
import secrets
import weakref

import torch

from psengine.collectives.base import Collective
from psengine.collectives.shared_memory.forked import keep_from_children
from psengine.collectives.shared_memory.host import bytes_of_words, succeed_together, words_of

TOKEN_BYTES = 16


def map_common_memory(collective: Collective, size_bytes: int) -> mmap.mmap:
    """Return ``size_bytes`` of zeros, at least one, that every rank sees; all ranks call it, and all succeed or raise.

    It is released with the last process that has it mapped. Its size is sealed: a file that shrank under its readers
    would kill them. Pages exist from the beginning, so that a machine without memory raises here.

    Args:
        collective: the ranks, which share a host, a user and a process namespace.
        size_bytes: as much as any rank needs.

    Raises:
        SharedMemoryUnavailableError: some rank cannot map it, such as for want of memory.
    """
    # The token stands behind what the caller sees.
    whole_bytes = size_bytes + TOKEN_BYTES
    token = secrets.token_bytes(TOKEN_BYTES)
    own_descriptor = -1
    try:
        if collective.rank == 0:
            own_descriptor = succeed_together(collective, lambda: _create(whole_bytes, token))
        else:
            succeed_together(collective, lambda: -1)
        place = torch.tensor([os.getpid(), own_descriptor, *words_of(token)])
        collective.broadcast([place], 0, what="where common memory is").wait()
        process_id, descriptor, *words = place.tolist()
        path = f"/proc/{process_id}/fd/{descriptor}"
        return succeed_together(collective, lambda: _map(path, whole_bytes, bytes_of_words(words)))
    finally:
        if own_descriptor >= 0:
            os.close(own_descriptor)


def _create(size_bytes: int, token: bytes) -> int:
    import fcntl  # not on Windows, where ranks share no memory

    descriptor = os.memfd_create("psengine-common", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
        os.pwrite(descriptor, token, size_bytes - TOKEN_BYTES)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _map(path: str, size_bytes: int, token: bytes) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        found = os.pread(descriptor, TOKEN_BYTES, size_bytes - TOKEN_BYTES)
        if found != token:
            raise OSError(f"{path} is another file than rank 0 made")
        memory = mmap.mmap(descriptor, size_bytes)
    except BaseException:
        os.close(descriptor)
        raise
    weakref.finalize(memory, os.close, descriptor).atexit = False
    keep_from_children(memory, torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr(), descriptor)
    return memory
