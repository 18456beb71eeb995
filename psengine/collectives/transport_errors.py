"""Did torch.distributed's transport fail, or the code that used it?"""

from __future__ import annotations

import torch.distributed as dist

# The source file or the library that gloo's and NCCL's errors name.
_SIGNS = ("gloo", "NCCL")


def is_transport_error(error: BaseException) -> bool:
    """Whether ``error`` comes from a transport of torch.distributed: a lost connection, a timeout, a dead store.

    torch has types for the errors of NCCL (``DistBackendError``), of sockets (``DistNetworkError``) and of stores
    (``DistStoreError``). gloo's exceptions reach Python as plain ``RuntimeError`` (seen in torch 2.13 with a killed
    peer, in ``Work.wait`` and in futures), as do those that passed through a future's callback in C++. Their text is
    all there is to tell them from a ``RuntimeError`` of a communication hook's own code; nothing else reads it.
    """
    if isinstance(error, dist.DistError):
        return True
    return type(error) is RuntimeError and any(sign in str(error) for sign in _SIGNS)
