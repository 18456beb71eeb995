"""The long error texts of the reducer.

They begin with native DDP's own words, because people search for those (and tests match them); what we can say better
follows: names instead of indices, and the rank.
"""

from __future__ import annotations

from collections.abc import Mapping

_PRIOR_REDUCTION = "Expected to have finished reduction in the prior iteration before starting a new one. "


CREATE_GRAPH_MESSAGE = (
    "Using DistributedDataParallel with create_graph=True is not well-supported. The higher-order gradient will not be"
    " synchronized across ranks, and backpropagation through all_reduce operations will not occur. If you require DDP"
    " to work with higher-order gradients for your use case, please ping https://github.com/pytorch/pytorch/issues/63929"
)

DISTRIBUTED_AUTOGRAD_MESSAGE = (
    "psengine.DistributedDataParallel exchanges the gradients that loss.backward() leaves in .grad (expected a forward"
    " outside of torch.distributed.autograd contexts, got one inside: what torch.distributed.autograd.backward()"
    " computes stays in its context, and on this rank). Fix: call the model outside of the context, or wrap this module"
    " in torch.nn.parallel.DistributedDataParallel, which exchanges the gradients of contexts too."
)

LOCAL_BACKWARD_MESSAGE = (
    "The model was called twice before its first backward, and backward runs a second time now: these gradients stay on"
    " this rank, because a backward exchanges gradients only where it is the first one after a forward (native DDP"
    " does the same and does not say so). Fix: call backward once, on the sum of the losses, or after each forward; use"
    " no_sync() around a forward and backward that are meant to stay local. This is said once."
)


def converted_message(name: str, rank: int, change: str) -> str:
    """A parameter got another accumulation node; ``change`` says of which dtype it was and is."""
    return (
        "Parameters must keep the dtype and device they had when the model was wrapped: torch drops the hooks of those"
        " that are converted or moved, and their gradients would stay on this rank without a word, as with native DDP"
        f" (parameter {name!r} on rank {rank}: {change}). Fix: call .double(), .half() or .to(...) before"
        " DistributedDataParallel(...), or wrap model.module anew afterwards; forwards that no backward follows belong"
        " under torch.no_grad()."
    )


def unfinished_reduction_message(rank: int, missing: Mapping[int, str], *, find_unused: bool) -> str:
    """Some parameters (index to name) got no gradient, so their buckets never filled."""
    if find_unused:
        advice = (
            "Since `find_unused_parameters=True` is enabled, this likely  means that not all `forward` outputs"
            " participate in computing loss. You can fix this by "
        )
    else:
        advice = (
            "You can enable unused parameter detection by passing the keyword argument `find_unused_parameters=True` to"
            " `torch.nn.parallel.DistributedDataParallel`, and by \n"
        )
    return (
        f"{_PRIOR_REDUCTION}This error indicates that your module has parameters that were not used in producing loss. "
        f"{advice}making sure all `forward` function outputs participate in calculating loss. \n"
        "If you already have done the above, then the distributed data parallel module wasn't able to locate the output"
        " tensors in the return value of your module's `forward` function. Please include the loss function and the"
        " structure of the return value of `forward` of your module when reporting this issue (e.g. list, dict,"
        " iterable).\n"
        f"{_describe_missing(rank, missing)}\n"
        "In addition, you can set the environment variable TORCH_DISTRIBUTED_DEBUG to either INFO or DETAIL to have"
        " torch report its collectives too."
    )


def _describe_missing(rank: int, missing: Mapping[int, str]) -> str:
    indices = " ".join(str(index) for index in missing)
    names = ", ".join(missing.values())
    return (
        f"Parameter indices which did not receive grad for rank {rank}: {indices}\n"
        f"Parameters which did not receive grad for rank {rank}: {names}"
    )


def graph_changed_message(rank: int, missing: Mapping[int, str]) -> str:
    """Parameters (index to name) of a static graph were not used this time."""
    return (
        f"{_PRIOR_REDUCTION}This error indicates that your training graph has changed in this iteration, e.g., one"
        " parameter is used in first iteration, but then got unused in the second iteration. this is not compatible"
        f" with static_graph set to True.\n{_describe_missing(rank, missing)}"
    )


def newly_used_message(name: str, rank: int) -> str:
    """A parameter of a static graph was used more often than in the first iteration."""
    return (
        "Your training graph has changed in this iteration, e.g., one parameter is unused in first iteration, but then"
        " got used in the second iteration. this is not compatible with static_graph set to True."
        f" (parameter {name!r} on rank {rank})"
    )


def marked_twice_message(index: int, name: str, *, has_marked_unused: bool) -> str:
    """A parameter's gradient became ready a second time in one backward."""
    third_reason = (
        "3) Incorrect unused parameter detection. The return value of the `forward` function is inspected by the"
        " distributed data parallel wrapper to figure out if any of the module's parameters went unused. For unused"
        " parameters, DDP would not expect gradients from then. However, if an unused parameter becomes part of the"
        " autograd graph at a later point in time (e.g., in a reentrant backward when using `checkpoint`), the gradient"
        " will show up unexpectedly. If all parameters in the model participate in the backward pass, you can disable"
        " unused parameter detection by passing the keyword argument `find_unused_parameters=False` to"
        " `torch.nn.parallel.DistributedDataParallel`. If unused parameters in the model do not change over iterations,"
        " You can try to use _set_static_graph() as a workaround if this module graph does not change during training"
        " loop."
    )
    return (
        "Expected to mark a variable ready only once. This error is caused by one of the following reasons: 1) Use of a"
        " module parameter outside the `forward` function. Please make sure model parameters are not shared across"
        " multiple concurrent forward-backward passes. or try to use _set_static_graph() as a workaround if this module"
        " graph does not change during training loop. 2) Reused parameters in multiple reentrant backward passes. For"
        " example, if you use multiple `checkpoint` functions to wrap the same part of your model, it would result in"
        " the same set of parameters been used by different reentrant backward passes multiple times, and hence marking"
        " a variable ready multiple times. DDP does not support such use cases in default. You can try to use"
        " _set_static_graph() as a workaround if your module graph does not change over iterations. "
        f"{third_reason if has_marked_unused else ''}\n"
        f"Parameter at index {index} with name {name} has been marked as ready twice. This means that multiple autograd"
        " engine  hooks have fired for this particular parameter during this iteration."
    )
