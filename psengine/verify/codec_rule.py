"""What "sync" and "sync-server" compute with a codec, for one process that holds all replicas; see ``averages``."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from psengine.codecs.base import Codec
from psengine.codecs.identity import IDENTITY
from psengine.codecs.registry import resolve_codec
from psengine.errors import ConfigurationError
from psengine.verify.averages import AtServers, Average, Over, OverCollective
from psengine.verify.codec_values import check_has_rule
from psengine.verify.parts import Part, elements, gather, in_memory_order, pieces_of, scatter
from psengine.verify.rule import Layout, MakeRule, Replicas, Rule


def of_collective(strategy: Any, world_size: int) -> MakeRule | None:
    """The rule of "sync" with a codec; None without one.

    Raises:
        ConfigurationError: the codec has no rule here.
    """
    codec = resolve_codec(strategy.__getstate__().get("compress"))
    check_has_rule(codec)
    return None if codec.is_lossless else lambda replicas, layout: CollectiveRule(replicas, layout, codec)


def of_servers(strategy: Any, world_size: int) -> MakeRule | None:
    """The rule of "sync-server" with a codec; None without one.

    Raises:
        ConfigurationError: the codec has no rule here, or averages are of those workers who come first.
    """
    given = strategy.__getstate__()
    codec, quorum = resolve_codec(given["compress"]), given["quorum"]
    check_has_rule(codec)
    if codec.is_lossless:
        return None
    if quorum is not None and quorum < world_size:
        raise ConfigurationError(
            f"which gradients a quorum averages depends on when they arrive (expected no quorum, or one of all"
            f" {world_size} ranks, got quorum={quorum}). Fix: leave out quorum, or --against native, and compare"
            " losses."
        )
    return lambda replicas, layout: ServersRule(replicas, layout, codec)


class CodecRule(Rule):
    """Averages the gradients of equal replicas.

    Args:
        replicas: the modules; their gradients are mutated.
        layout: of the training that is compared, in its last step: blocks and slices follow from it.
        codec: of its strategy.
    """

    averages_gradients = True
    over: ClassVar[Over]
    # Whether what was sent of a parameter that no replica used counts.
    counts_unused: ClassVar[bool]

    def __init__(self, replicas: Replicas, layout: Layout, codec: Codec) -> None:
        self._replicas, self._layout, self._codec = replicas, layout, codec
        # As ``layout`` returned them, and the average of each.
        self._buckets: Sequence[Sequence[Part]] = []
        self._averages: list[Average] = []

    @override
    @torch.no_grad()
    def before_step(self) -> None:
        buckets = self._layout()
        if buckets is not self._buckets:
            self._lay_out(buckets)
        names = list(dict.fromkeys(part.name for bucket in buckets for part in bucket))
        gradients = {name: [replica.get_parameter(name).grad for replica in self._replicas] for name in names}
        sparse = {name for name, own in gradients.items() if any(one is not None and one.is_sparse for one in own)}
        used = {name for name, own in gradients.items() if any(one is not None for one in own)} - sparse
        sent = [
            {name: elements(own[rank], self._parameter(name)) for name, own in gradients.items() if name not in sparse}
            for rank in range(len(self._replicas))
        ]
        arrived = {name: torch.empty_like(flat) for name, flat in sent[0].items()}
        for bucket, average in zip(buckets, self._averages, strict=True):
            if bucket[0].name in sparse:
                self._average_sparse(bucket[0].name)
                continue
            values = average(self.over.addends([gather(flats, bucket) for flats in sent]))
            scatter(values, bucket, arrived)
            ends = list(itertools.accumulate(part.numel for part in bucket))
            for part, end in zip(bucket, ends, strict=True):
                if part.name not in used and not self.counts_unused:
                    average.spare(end - part.numel, end)
        for name in used:
            self._write(name, arrived[name])

    def _parameter(self, name: str) -> torch.nn.Parameter:
        return self._replicas[0].get_parameter(name)

    def _average_sparse(self, name: str) -> None:
        alike = [replica.get_parameter(name) for replica in self._replicas]
        dense = [torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in alike]
        average = self.over.average(IDENTITY, len(dense), dense[0].dtype, [])(self.over.addends(dense))
        for p in alike:
            p.grad = average.to_sparse(1)

    def _write(self, name: str, flat: Tensor) -> None:
        for replica in self._replicas:
            parameter = replica.get_parameter(name)
            values = in_memory_order(flat.clone(), parameter)
            if parameter.grad is None:
                parameter.grad = values
            else:
                parameter.grad.copy_(values)

    def _lay_out(self, buckets: Sequence[Sequence[Part]]) -> None:
        """Residuals move with their parameters."""
        residuals: list[dict[Part, Tensor]] = [{} for _ in self._replicas]
        for bucket, average in zip(self._buckets, self._averages, strict=True):
            average.lay_out_anew()
            for kept, one in zip(residuals, average.up, strict=False):
                if one.residual is not None:
                    kept.update(zip(bucket, one.residual.split([part.numel for part in bucket]), strict=True))
        self._buckets, self._averages = buckets, []
        for bucket in buckets:
            dtype = self._parameter(bucket[0].name).dtype
            pieces = pieces_of(bucket, self._replicas[0])
            average = self.over.average(self._codec, len(self._replicas), dtype, pieces)
            self._averages.append(average)
            for kept, one in zip(residuals, average.up, strict=False):
                if bucket[0] in kept:
                    one.residual = torch.cat([kept[part] for part in bucket])

    def _copy_buffers(self) -> None:
        if not self.exchanges_buffers:
            return
        for buffers in zip(*(replica.buffers() for replica in self._replicas), strict=True):
            for buffer in buffers[1:]:
                buffer.copy_(buffers[0])


class CollectiveRule(CodecRule):
    """Of "sync"."""

    over = OverCollective()
    counts_unused = False

    @override
    @torch.no_grad()
    def before_forward(self) -> None:
        """Replicas have rank 0's buffers, as native DDP's."""
        self._copy_buffers()


class ServersRule(CodecRule):
    """Of "sync-server", whose buckets are the chunks that servers average."""

    over = AtServers()
    counts_unused = True

    @override
    @torch.no_grad()
    def before_step(self) -> None:
        """Buffers travel with gradients: all replicas have rank 0's after backward."""
        super().before_step()
        self._copy_buffers()
