"""Do the ranks have the same model and options? Checked before a weight moves; what differs is named."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from typing import Any

import torch

from psengine.collectives.base import Collective
from psengine.errors import ReplicaMismatchError
from psengine.protocol.layout import ONE_ORDER

logger = logging.getLogger(__name__)

# [name, sizes, strides, dtype]
Description = list[list[Any]]


def verify_replicas(
    collective: Collective,
    parameters: Mapping[str, torch.nn.Parameter],
    state: Mapping[str, torch.Tensor],
    device: torch.device,
    options: Mapping[str, str],
    *,
    pairs_by_position: bool = False,
) -> None:
    """Compare number, names, shape, strides and dtype of the tensors across ranks, and options; every rank calls it.

    Costs one all-gather of 32 bytes where all agree; only otherwise the descriptions travel (as JSON), so that the
    error, which every rank raises, names the first tensor that differs and the rank it differs on.

    Args:
        collective: the group of replicas.
        parameters: name to parameter, for those whose gradients are exchanged, in model order.
        state: name to tensor, for all that will be broadcast.
        device: where to put the tensors of the comparison.
        options: what else all ranks have to choose alike, by name.
        pairs_by_position: only warn, on rank 0, of other names at the same places, as native DDP pairs tensors.

    Raises:
        ReplicaMismatchError: some rank's tensors or options differ from rank 0's.
    """
    if collective.world_size == 1:
        return
    others = {name: tensor for name, tensor in state.items() if name not in parameters}
    kinds = {"params": parameters, "buffers and frozen parameters": others}
    description = {kind: [_describe(*item) for item in tensors.items()] for kind, tensors in kinds.items()}
    identity = json.dumps([dict(options), list(description.values())]).encode()
    digest = torch.frombuffer(bytearray(hashlib.sha256(identity).digest()), dtype=torch.int64).to(device)
    digests = [d.tolist() for d in collective.gather(digest, what="model description digest")]
    if all(d == digests[0] for d in digests):
        return
    payload = json.dumps([[f"{name}={value}" for name, value in options.items()], description]).encode()
    found = [json.loads(one) for one in collective.gather_bytes(payload, device, what="model description")]
    shared = set.intersection(*(set(given) for given, _ in found))
    chosen = [",".join(option for option in given if option not in shared) for given, _ in found]
    if any(chosen):
        texts = [text or "the defaults" for text in chosen]
        raise ReplicaMismatchError(
            f"all ranks have the same options (expected {texts[0]} of rank 0 on every rank, got, by rank,"
            f" {'; '.join(texts)}; seen on rank {collective.rank}). Fix: give every rank the same ones."
        )
    by_kind = {kind: [one[kind] for _, one in found] for kind in kinds}
    differences = [_first_difference(by_kind[kind], kind, collective.rank) for kind in kinds]
    if text := next(filter(None, differences), ""):
        raise ReplicaMismatchError(text)
    text = next(filter(None, (_first_other_name(by_kind[kind], kind) for kind in kinds)))
    if not pairs_by_position:
        raise ReplicaMismatchError(f"{text} (seen on rank {collective.rank}). {ONE_ORDER}.")
    if collective.rank == 0:
        logger.warning(
            "%s. They are paired by position, as by native DDP: rank 0's value of the one overwrites the other, and"
            " their gradients are averaged. %s.",
            *(text, ONE_ORDER),
        )


def _first_other_name(descriptions: list[Description], kind: str) -> str:
    """Describe the first place where a rank has another name than rank 0; empty without one."""
    for rank, description in enumerate(descriptions):
        for index, (expected, got) in enumerate(zip(descriptions[0], description, strict=True)):
            if expected[0] != got[0]:
                return (
                    f"every rank must register its tensors in the same order (expected {expected[0]!r} of rank 0 at"
                    f" {kind}[{index}], got {got[0]!r} on rank {rank})"
                )
    return ""


def _describe(name: str, tensor: torch.Tensor) -> list[Any]:
    return [name, list(tensor.shape), list(tensor.stride()), str(tensor.dtype)]


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
