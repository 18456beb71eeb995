"""Anonymous files (memfd) that processes of one host share, and memory that is mapped from them.

A file has no name in a folder: another process opens it as /proc/<process>/fd/<descriptor>, and knows it by a token at
its end. So the size of /dev/shm does not matter, and memory is released with the last process that has it, however
processes end. A file's size is sealed: one that shrank under its readers would kill them.

What ranks share becomes private to a forked child: a child inherits its parent's mappings, and one that steps, zeroes
gradients or runs a backward would write into buckets and parameters of ranks that train. Its pages are mapped anew at
the same addresses, so its tensors stay as they are: it sees the ranks' values, until it writes to a page.
"""

from __future__ import annotations

import mmap
import os
import secrets
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from psengine.collectives.base import Collective
from psengine.errors import SharedMemoryUnavailableError
from psengine.kernels.private_memory import map_privately

Made = TypeVar("Made")

NAME = "psengine-"
TOKEN_BYTES = 8
# By mapping: its address, size and file descriptor.
_mappings: weakref.WeakKeyDictionary[mmap.mmap, tuple[int, int, int]] = weakref.WeakKeyDictionary()


def make_token() -> int:
    """A number that no other file has; fits into a tensor."""
    return secrets.randbits(63)


def make_file(kind: str, size_bytes: int, token: int | None = None) -> int:
    """Make a file of zeros, with ``token`` behind them, and return its descriptor.

    A file with a token takes its memory now, so that a machine without it raises here; another when it is written.

    Args:
        kind: stands in /proc/<process>/maps.
        size_bytes: without the token.
        token: None for a file that is never looked for with ``open_file``.

    Raises:
        OSError: there is no memory, no file descriptor, or no memfd.
    """
    import fcntl  # not on Windows, where ranks share no memory

    descriptor = os.memfd_create(NAME + kind, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        if token is None:
            os.ftruncate(descriptor, size_bytes)
        else:
            os.posix_fallocate(descriptor, 0, size_bytes + TOKEN_BYTES)
            os.pwrite(descriptor, token.to_bytes(TOKEN_BYTES, "little"), size_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_file(process_id: int, descriptor: int, token: int) -> int:
    """Open the file that another process has as ``descriptor``.

    Raises:
        OSError: it cannot be opened, or is not the one with ``token``.
    """
    path = f"/proc/{process_id}/fd/{descriptor}"
    # In another process namespace the number may be any process's, and opening some files has effects.
    if descriptor < 0 or not os.readlink(path).startswith(f"/memfd:{NAME}"):
        raise OSError(f"{path} is not memory of a rank")
    opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    end = os.fstat(opened).st_size - TOKEN_BYTES
    if end < 0 or os.pread(opened, TOKEN_BYTES, end) != token.to_bytes(TOKEN_BYTES, "little"):
        os.close(opened)
        raise OSError(f"{path} is memory of another group")
    return opened


def map_file(descriptor: int, size_bytes: int) -> mmap.mmap:
    """Map a file, which is closed with the mapping, or where that fails; a child that is forked has its own copy."""
    try:
        memory = mmap.mmap(descriptor, size_bytes)
    except BaseException:
        os.close(descriptor)
        raise
    weakref.finalize(memory, os.close, descriptor).atexit = False
    _mappings[memory] = (address_of(memory), size_bytes, descriptor)
    return memory


def address_of(memory: mmap.mmap) -> int:
    """Where a mapping begins."""
    return torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr()


def share_file(ranks: Collective, size_bytes: int, use: Callable[[int, int], Made]) -> Made:
    """Make one file for all ranks, and return what ``use`` returns; all ranks call it, and all succeed or raise.

    Args:
        ranks: share a host, a user and a process namespace.
        size_bytes: the same on every rank.
        use: called with a descriptor of the file, which it closes, and with the file's token.

    Raises:
        SharedMemoryUnavailableError: rank 0 cannot make it, or some rank cannot use it.
    """
    own, token = -1, make_token()
    error: OSError | None = None
    if ranks.rank == 0:
        try:
            own = make_file("common", size_bytes, token)
        except OSError as failure:
            error = failure
    try:
        place = torch.tensor([os.getpid(), own, token])
        ranks.broadcast([place], 0, what="where shared memory is").wait()
        process_id, descriptor, token = place.tolist()

        def open_and_use() -> Made:
            if error is not None:
                raise error
            return use(open_file(process_id, descriptor, token), token)

        return succeed_together(ranks, open_and_use)
    finally:
        if own >= 0:
            os.close(own)


def succeed_together(ranks: Collective, action: Callable[[], Made], collective: str = "shared_memory") -> Made:
    """Return what ``action`` returns; raise on every rank where it fails on one, in the name of ``collective``."""
    result: Any = None
    error = None
    try:
        result = action()
    except (OSError, RuntimeError) as failure:
        error = failure
    successes = ranks.gather(torch.tensor([error is None]), what="whether shared memory works")
    failed = [rank for rank, success in enumerate(successes) if not success.item()]
    if failed:
        why = f": {error}" if error is not None else ""
        raise SharedMemoryUnavailableError(
            f"collective {collective!r} cannot connect these ranks: ranks {failed} cannot reach the others{why}"
        ) from error
    made: Made = result
    return made


def _map_all_privately() -> None:
    for address, size_bytes, descriptor in list(_mappings.values()):
        map_privately(address, size_bytes, descriptor)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_map_all_privately)
