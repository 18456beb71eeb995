"""Living beside torch.compile without importing it: loading torch._dynamo takes seconds and most programs never do."""

from __future__ import annotations

import sys

_is_registered = False


def stay_out_of_graphs() -> None:
    """Once dynamo is loaded, tell it to run psengine's own frames as plain Python and compile only what they call.

    Without this it would trace hooks, timers and bucket views piece by piece. Cheap enough for every forward.
    """
    global _is_registered
    if not _is_registered and (rules := getattr(sys.modules.get("torch._dynamo"), "trace_rules", None)) is not None:
        rules.add("psengine")
        _is_registered = True


def traces_gradient_exchange() -> bool:
    """Whether dynamo is set to trace gradient exchange itself (``optimize_ddp = "python_reducer"``)."""
    utils = getattr(sys.modules.get("torch._dynamo"), "utils", None)
    return utils is not None and utils.get_optimize_ddp_mode() == "python_reducer"
