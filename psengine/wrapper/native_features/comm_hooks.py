"""Communication hooks: user code in place of the all-reduce, with native DDP's calling convention."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from psengine.errors import ArgumentTypeError, CommunicationHookError, ConfigurationError
from psengine.tensors.bucket import Bucket

UserHook = Callable[..., "torch.futures.Future[torch.Tensor]"]


class GradBucket:
    """A packed bucket as a communication hook sees it; the interface of ``torch.distributed.GradBucket``."""

    def __init__(self, bucket: Bucket, *, is_last: bool) -> None:
        self._bucket = bucket
        self._buffer = bucket.flat
        self._is_last = is_last

    def index(self) -> int:
        """Place in the order of reduction, 0 first; may change once, when buckets are rebuilt."""
        return self._bucket.index

    def buffer(self) -> torch.Tensor:
        """The flat gradients, not divided by the world size."""
        return self._buffer

    def set_buffer(self, tensor: torch.Tensor) -> None:
        """Replace the flat gradients, for example by a compressed copy."""
        self._buffer = tensor

    def gradients(self) -> list[torch.Tensor]:
        """Per parameter its part of ``buffer()``, row-major whatever the parameter's strides."""
        if self._bucket.sparse:
            return [self._buffer]
        parts = self._buffer.split([parameter.numel() for parameter in self._bucket.parameters])
        return [part.view(parameter.shape) for part, parameter in zip(parts, self._bucket.parameters, strict=True)]

    def parameters(self) -> list[torch.Tensor]:
        """The bucket's parameters, in the order of ``gradients()``."""
        return list(self._bucket.parameters)

    def is_last(self) -> bool:
        """Whether this is the last bucket of the backward."""
        return self._is_last


def check_comm_hook(replica: Any, hook: Any) -> None:
    """Raise unless ``hook`` has the signature ``hook(state, bucket) -> Future[Tensor]``; annotations are optional.

    Raises:
        ArgumentTypeError: not callable.
        ConfigurationError: other parameters, or annotated with other types.
    """
    if not callable(hook):
        replica._log_and_throw(ArgumentTypeError, f"Communication hook must be callable. (got {type(hook).__name__})")
    try:
        signature = inspect.signature(hook, eval_str=True)  # ``from __future__ import annotations`` leaves text
    except (NameError, SyntaxError, TypeError):
        signature = inspect.signature(hook)
    bucket = signature.parameters.get("bucket")
    if bucket is None or bucket.annotation not in (inspect.Parameter.empty, dist.GradBucket, GradBucket):
        replica._log_and_throw(
            ConfigurationError,
            "Communication hook: bucket annotation should be dist.GradBucket. (expected parameters (state, bucket), got"
            f" {signature})",
        )
    returned = signature.return_annotation
    if returned not in (inspect.Signature.empty, torch.futures.Future[torch.Tensor]):
        replica._log_and_throw(
            ConfigurationError,
            f"Communication hook: return annotation should be torch.futures.Future[torch.Tensor]. (got {returned})",
        )


def bucket_hook(state: object, hook: UserHook, replica_reference: weakref.ref[Any]) -> Callable[[Bucket], Any]:
    """Adapt a user's hook, and its first argument, to what the strategy of a wrapped model calls."""

    def run(bucket: Bucket) -> torch.futures.Future[Any]:
        replica = replica_reference()
        assert replica is not None, "a backward outlived its model"
        future = hook(state, GradBucket(bucket, is_last=bucket.index == len(replica.reducer.buckets) - 1))
        # torch._C.Future is what C++ returns (Work.get_future); torch.futures.Future derives from it.
        if not isinstance(future, torch._C.Future):
            raise CommunicationHookError(
                f"callback must return a torch.futures.Future object, but got {type(future).__module__}."
                f"{type(future).__qualname__} from communication hook {getattr(hook, '__qualname__', hook)!r}. Fix:"
                " future = torch.futures.Future(); future.set_result(gradients); return future"
            )
        return future

    return run


BUILTIN_HOOKS: dict[Any, UserHook] = {
    dist.BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,
    dist.BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,
}


def sum_over_group(replica_reference: weakref.ref[Any], bucket: Any) -> Any:
    """Sum the bucket's buffer, undivided, over the ranks of the wrapped model; a future of the buffer."""
    replica = replica_reference()
    assert replica is not None, "a backward outlived its model"
    work = replica.process_group.allreduce([bucket.buffer()])
    return work.get_future().then(lambda future: future.value()[0])
