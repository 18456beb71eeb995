"""Native DDP's experimental ``mixed_precision``: forward and backward in a lower precision than the parameters'.

Native's own functions and hooks do the work; this connects them to our reducer.
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from typing import Any

import torch
from torch.nn.parallel import distributed as native


def set_up_mixed_precision(replica: Any) -> None:
    """Add native DDP's casts around forward, and the hook that reduces in the lower precision, to a wrapped model.

    Mutates the module: its buffers are cast, its parameters and submodules get attributes and hooks.
    """
    from torch.distributed.algorithms.ddp_comm_hooks.mixed_precision_hooks import (
        _AllreduceUpcastHookState,
        _reducer_allreduce_and_upcast_hook,
    )

    for index, parameter in enumerate(replica.reducer.parameters):
        parameter._idx = index
    native._setup_mixed_precision_params(replica.mixed_precision, replica.module)
    native._cast_buffers(replica.mixed_precision, replica.module)
    # Read by native DDP's forward hooks, which the wrapper inherits.
    replica._mp_stream = torch.Stream()
    replica._submodule_to_event = defaultdict(deque)
    replica.module.register_forward_pre_hook(replica._root_copy_hook, prepend=False, with_kwargs=True)
    for module in replica.module.modules():
        module.register_forward_pre_hook(replica._module_wait_for_copy_hook, prepend=False, with_kwargs=True)
    state = _AllreduceUpcastHookState(ddp_weakref=weakref.ref(replica), upcast_stream=torch.Stream())
    replica.register_comm_hook(state, _reducer_allreduce_and_upcast_hook)
