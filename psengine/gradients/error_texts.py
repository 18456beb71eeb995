"""The long texts of the reducer: errors, and warnings, which are logged, because native DDP's come from C++ too.

They begin with native DDP's own words, because people search for those (and tests match them). Then they name
parameters instead of indices, the rank, and the fix.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_PRIOR_REDUCTION = "Expected to have finished reduction in the prior iteration before starting a new one. "

NONE_UNUSED_MESSAGE = (
    "find_unused_parameters=True was specified in DDP constructor, but did not find any unused parameters in the"
    " forward pass. This flag results in an extra traversal of the autograd graph every iteration, which can adversely"
    " affect performance. Fix: leave it out if all parameters are used in every iteration."
)

CREATE_GRAPH_MESSAGE = (
    "Using DistributedDataParallel with create_graph=True is not well-supported. The higher-order gradient will not be"
    " synchronized across ranks, and backpropagation through all_reduce operations will not occur; see"
    " https://github.com/pytorch/pytorch/issues/63929"
)

DISTRIBUTED_AUTOGRAD_MESSAGE = (
    "psengine.DistributedDataParallel exchanges the gradients that loss.backward() leaves in .grad (expected a forward"
    " outside of torch.distributed.autograd contexts, got one inside: what torch.distributed.autograd.backward()"
    " computes stays in its context, and on this rank). Fix: call the model outside of the context, or wrap this module"
    " in torch.nn.parallel.DistributedDataParallel, which exchanges the gradients of contexts too."
)


def converted_message(name: str, rank: int) -> str:
    """A parameter got another accumulation node."""
    return (
        "Parameters must keep the dtype and device they had when the model was wrapped: torch drops the hooks of those"
        " that are converted or moved, and their gradients would stay on this rank without a word, as with native DDP"
        f" (parameter {name!r} on rank {rank}). Fix: call .double(), .half() or .to(...) before wrapping, or wrap"
        " model.module anew; forwards that no backward follows belong under torch.no_grad()."
    )


def replaced_message(name: str, rank: int) -> str:
    """A parameter that got no gradient is not the module's any more."""
    return (
        f"{_PRIOR_REDUCTION}Modules must keep the parameters that they had when the model was wrapped: the gradient of"
        f" another in the place of one stays on this rank (parameter {name!r} on rank {rank} is another object, or"
        " gone). Fix: replace parameters, or call load_state_dict(..., assign=True), before wrapping; or wrap"
        " model.module anew, and make the optimizer from its parameters."
    )


def thawed_message(name: str, rank: int, strategy: Any) -> str:
    """A parameter that was frozen has a gradient, which this strategy does not take."""
    fix = (
        "wrap the model after thawing"
        if strategy.capabilities.has_virtual_workers
        else f"thaw, model.switch_strategy({str(strategy)!r}), then go on"
    )
    return (
        f"strategy {str(strategy)!r} exchanges the parameters that needed gradients when the model was wrapped"
        f" (expected no gradient of one that was frozen then, got one of {name!r} on rank {rank}). Fix: {fix}."
    )


def unfinished_reduction_message(rank: int, missing: Mapping[int, str], *, find_unused: bool) -> str:
    """Some parameters (index to name) got no gradient, so their buckets never filled."""
    advice = (
        "Since `find_unused_parameters=True` is enabled, some outputs are probably not part of the loss. Fix:"
        if find_unused
        else "Fix: enable unused parameter detection by passing the keyword argument `find_unused_parameters=True` to"
        " DistributedDataParallel, or"
    )
    return (
        f"{_PRIOR_REDUCTION}This error indicates that your module has parameters that were not used in producing loss."
        f" {advice} make sure that all `forward` function outputs participate in calculating loss. Tensors are found in"
        f" lists, tuples, dicts and dataclasses.\n{_describe_missing(rank, missing)}\nYou can also set the environment"
        " variable TORCH_DISTRIBUTED_DEBUG to either INFO or DETAIL to have torch report its collectives too."
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


def counted_nothing_message(rank: int) -> str:
    """The backward that a static graph counted reached no parameter."""
    return (
        "static_graph=True counts which parameters the first backward after a forward uses (expected loss.backward(),"
        f" got one that reached no parameter on rank {rank}, as torch.autograd.grad of an input does for a gradient"
        " penalty). Fix: static_graph=False."
    )


def marked_twice_message(index: int, name: str, *, has_marked_unused: bool) -> str:
    """A parameter's gradient became ready a second time in one backward."""
    third_reason = (
        " 3) Incorrect unused parameter detection: the parameter was not in the graph when `forward` returned, and is"
        " used later, for example by a reentrant `checkpoint`. Fix: find_unused_parameters=False where all are used."
    )
    return (
        "Expected to mark a variable ready only once. This error is caused by one of the following reasons: 1) Use of a"
        " module parameter outside the `forward` function, or in several forward-backward passes at once. 2) Reused"
        " parameters in multiple reentrant backward passes, for example several `checkpoint` functions around the same"
        f" part of the model.{third_reason if has_marked_unused else ''} Fix: static_graph=True, if the graph does not"
        f" change between iterations.\nParameter at index {index} with name {name} has been marked as ready twice. This"
        " means that multiple autograd engine  hooks have fired for this particular parameter during this iteration."
    )
