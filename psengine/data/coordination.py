"""What workers of a training do together besides gradients: wait, share a value, print once, stop on a bad loss.

``barrier`` and ``broadcast_object`` are of the process group, as ``psengine.mean``: an independent worker is a world of
its own, and they return at once there. ``print`` and the stop rule are of the job, whatever launched it.
"""

from __future__ import annotations

import builtins
import math
import numbers
from typing import Any, TextIO

import torch
import torch.distributed as dist

from psengine.collectives.registry import collective_for, default_group
from psengine.data.value_exchange import ValueExchange, check_has_met
from psengine.environment.context import is_main_process, this_worker
from psengine.errors import ArgumentTypeError, ConfigurationError, NonFiniteLossError, PSEngineError
from psengine.tensors.leaves import is_real_scalar, to_float
from psengine.tensors.objects import from_bytes, to_bytes


def barrier(process_group: dist.ProcessGroup | None = None) -> None:
    """Return when every rank has called it. An independent worker waits for nobody: its group is itself alone.

    Args:
        process_group: the ranks; None means the default group, or this process alone without one.

    Raises:
        ConfigurationError: the launcher started several ranks, and ``psengine.init`` was not called.
        PeerLostError: ranks died meanwhile; names them.
        CollectiveError: not all ranks came within the ``timeout`` of ``psengine.init``.
    """
    check_has_met(process_group, "barrier")
    collective_for(process_group or default_group()).barrier().wait()


def broadcast_object(value: Any, from_rank: int = 0, process_group: dist.ProcessGroup | None = None) -> Any:
    """Return ``from_rank``'s ``value`` on every rank; the other ranks' values are ignored.

    It travels through ``torch.save`` and ``torch.load(weights_only=True)``, which runs nobody's code. An independent
    worker gets a copy of its own value: its group is itself alone.

    Args:
        value: None, bool, int, float, str, bytes, tensors, and lists, tuples, sets and dicts of these; what else
            ``torch.load(weights_only=True)`` takes. Not mutated.
        from_rank: whose value; the same on every rank.
        process_group: the ranks; None means the default group, or this process alone without one.

    Returns:
        A copy, on ``from_rank`` too. Tensors are detached; those on an accelerator land on each rank's current one.

    Raises:
        ArgumentTypeError: this rank is ``from_rank``, and its value holds something else.
        ConfigurationError: there is no such rank; or, as for ``barrier``, no group.
        ReplicaMismatchError: the ranks made different calls, or the value of ``from_rank`` cannot be sent.
        CollectiveError: a rank did not come within the ``timeout`` of ``psengine.init``, or died.
    """
    exchange = ValueExchange("broadcast_object", process_group)
    exchange.verb = f"broadcast_object from rank {from_rank}"
    collective = exchange.collective
    payload, copy = b"", None
    if type(from_rank) is not int or not 0 <= from_rank < collective.world_size:
        error: PSEngineError = ConfigurationError(
            f"from_rank is a rank of the group (expected 0 to {collective.world_size - 1}, got {from_rank!r}). In an"
            " independent worker the group is that process alone: its number is context.worker."
        )
        exchange.faults["from_rank"] = repr(from_rank), error
    elif collective.rank == from_rank:
        try:
            payload = to_bytes(value)
            copy = from_bytes(payload)  # what the others could not read is refused here
        except Exception as reason:  # of a user's class too: the other ranks are to be told of it
            error = ArgumentTypeError(
                "broadcast_object() takes what torch.load(weights_only=True) reads (expected None, numbers, text,"
                f" tensors, and lists, tuples and dicts of these, got {type(value).__name__}: {_first_line(reason)})."
                " Fix: send what it is made of, such as a dict of its fields, and build it anew on each rank."
            )
            exchange.faults["the value"] = f"unfit ({_first_line(reason)})", error
    exchange.check({})
    payload = collective.broadcast_bytes(payload, from_rank, exchange.device, what="broadcast_object()")
    return copy if collective.rank == from_rank else from_bytes(payload)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def print(*values: object, sep: str = " ", end: str = "\n", file: TextIO | None = None, flush: bool = False) -> None:
    """Print as the built-in function does, on the main process (worker 0 of the job) alone."""
    if is_main_process():
        builtins.print(*values, sep=sep, end=end, file=file, flush=flush)


def stop_if_not_finite(loss: float | torch.Tensor) -> None:
    """Raise where ``loss`` is NaN or infinite; call it between forward and backward, before the gradients travel.

    It looks at this worker's loss alone and exchanges nothing. Reading a loss on a GPU waits for that GPU. How the
    other workers end: torchrun and ``psengine run`` end the ranks of a process group; where no launcher does, they
    raise ``PeerLostError`` at their next exchange. Independent workers under async go on without this one.

    Args:
        loss: a real number, or a tensor of one element.

    Raises:
        NonFiniteLossError: it is not finite; names this worker and the value.
        ArgumentTypeError: it is no single real number.
    """
    given: Any = loss
    if not isinstance(given, numbers.Real) and not is_real_scalar(given):
        raise ArgumentTypeError(
            f"stop_if_not_finite() takes one real number (got {loss!r}). Fix: stop_if_not_finite(loss.mean())."
        )
    value, worker = to_float(loss), this_worker()
    if not math.isfinite(value):
        raise NonFiniteLossError(
            f"the loss of worker {worker} is {value} (expected a finite number). Fix: lower the learning rate, clip"
            " gradients (torch.nn.utils.clip_grad_norm_), or check this worker's last batch.",
            worker=worker,
            loss=value,
        )
