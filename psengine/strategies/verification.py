"""Do the ranks have the same model and options? Checked before a weight moves; what differs is named."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch

from psengine.collectives.base import Collective
from psengine.errors import ReplicaMismatchError

# [name, sizes, strides, dtype]
Description = list[list[Any]]


def verify_replicas(
    collective: Collective,
    parameters: Mapping[str, torch.nn.Parameter],
    state: Mapping[str, torch.Tensor],
    device: torch.device,
    options: Mapping[str, str],
) -> None:
    """Compare number, shape, strides and dtype of the tensors across ranks, and options; every rank calls it.

    Costs one all-gather of 32 bytes where all agree; only otherwise the descriptions travel (as JSON), so that the
    error, which every rank raises, names the first tensor that differs and the rank it differs on.

    Args:
        collective: the group of replicas.
        parameters: name to parameter, for those whose gradients are exchanged, in model order.
        state: name to tensor, for all that will be broadcast.
        device: where to put the tensors of the comparison.
        options: what else all ranks have to choose alike, by name.

    Raises:
        ReplicaMismatchError: some rank's tensors or options differ from rank 0's.
    """
    if collective.world_size == 1:
        return
    description = [_describe(parameters), _describe({n: t for n, t in state.items() if n not in parameters})]
    # Names are for the message only: native DDP pairs tensors by position.
    description.append([[f"{key}={value}"] for key, value in options.items()])
    identity = json.dumps([*([entry[1:] for entry in part] for part in description[:2]), description[2]]).encode()
    digest = torch.frombuffer(bytearray(hashlib.sha256(identity).digest()), dtype=torch.int64).to(device)
    digests = [d.tolist() for d in collective.gather(digest, what="model description digest")]
    if all(d == digests[0] for d in digests):
        return
    payloads = collective.gather_bytes(json.dumps(description).encode(), device, what="model description")
    descriptions: list[Description] = [json.loads(payload) for payload in payloads]
    options_by_rank = [[option for (option,) in d[2]] for d in descriptions]
    if any(given != options_by_rank[0] for given in options_by_rank):
        shared = set(options_by_rank[0]).intersection(*options_by_rank)
        chosen = [
            ",".join(option for option in given if option not in shared) or "the defaults" for given in options_by_rank
        ]
        raise ReplicaMismatchError(
            f"all ranks have the same options (expected {chosen[0]} of rank 0 on every rank, got, by rank,"
            f" {'; '.join(chosen)}; seen on rank {collective.rank}). Fix: give every rank the same ones."
        )
    for index, kind in enumerate(("params", "buffers and frozen parameters")):
        difference = _first_difference([d[index] for d in descriptions], kind, collective.rank)
        if difference:
            raise ReplicaMismatchError(difference)
    raise AssertionError("descriptions of different digests are equal")


def _describe(tensors: Mapping[str, torch.Tensor]) -> Description:
    return [[name, list(t.shape), list(t.stride()), str(t.dtype)] for name, t in tensors.items()]


def _first_difference(descriptions: list[Description], kind: str, this_rank: int) -> str:
    """Describe the first difference from rank 0's tensors of this kind; empty without one."""
    reference = descriptions[0]
    for rank, description in enumerate(descriptions):
        if len(description) != len(reference):
            return (
                f"DDP expects same model across all ranks, but Rank 0 has {len(reference)} {kind}, while rank {rank}"
                f" has inconsistent {len(description)} {kind}. {_extra_names(reference, description, rank)}"
                f" (seen on rank {this_rank}). Build the model from the same code and configuration on every rank."
            )
        for index, (expected, got) in enumerate(zip(reference, description, strict=True)):
            if expected[1:] == got[1:]:
                continue
            for what, e, g in zip(("sizes", "strides", "dtype"), expected[1:], got[1:], strict=True):
                if e != g:
                    return (
                        f"[{rank}]: {kind}[{index}] ({got[0]!r}) in this process with {what} {g} appears not to match"
                        f" {what} of the same param in process 0. (rank 0: {expected[0]!r} with {what} {e};"
                        f" rank {rank}: {g}; seen on rank {this_rank}). Build the model from the same code and"
                        " configuration on every rank."
                    )
    return ""


def _extra_names(reference: Description, description: Description, rank: int) -> str:
    names, other_names = [e[0] for e in reference], [e[0] for e in description]
    only_reference = [n for n in names if n not in set(other_names)]
    only_other = [n for n in other_names if n not in set(names)]
    return f"Only rank 0 has {only_reference or 'nothing'}, only rank {rank} has {only_other or 'nothing'}"
