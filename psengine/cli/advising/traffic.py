"""What one exchange costs a host: bytes on its link, messages in a row, passes over memory. Pure.

H hosts with K ranks each, W = H K ranks; S bytes of float32 values, whose payloads are p bytes::

    road           a host sends                      messages in a row    of
    ring           2 (W-1)/W p                       2 (W-1)              values, bf16, fp16
    slices         K (W-K)/W p, then (W-1)/W p       1, then W-1          int8, fp4, onebit
    gathered       (W-1) p                           W-1                  topk
    rounds         (W-1)/W p, twice                  2 (W-1), twice       powersgd
    hierarchical   (H-1)/H S, twice                  1, then H-1          collective hierarchical
    servers        K (H-1)/H p, twice                1, then 1            servers, a shard on each host

"ring" is gloo's all-reduce, "slices" and "rounds" are those of ``strategies/bucket_exchange.py``, "hierarchical" is
``collectives/hierarchy/collective.py``. In a ring over hosts one rank of each sends to another host.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import torch

from psengine.codecs.base import Codec
from psengine.codecs.registry import CODECS
from psengine.errors import ConfigurationError
from psengine.specification import Specification
from psengine.strategies.registry import STRATEGIES

HIERARCHICAL = "hierarchical"


@dataclass(frozen=True, kw_only=True)
class Coding:
    """A codec on one core: seconds for a byte of values, and what is left of that byte.

    Attributes:
        payload: bytes of the payload for each byte of values.
        encode_s: with the residual.
        decode_s: once.
        decode_add_s: decoded and added.
    """

    payload: float = 1.0
    encode_s: float = 0.0
    decode_s: float = 0.0
    decode_add_s: float = 0.0


PLAIN = Coding()


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A message on the link and the work before it; all but ``messages`` for each byte of values.

    Attributes:
        coding_s: seconds of a rank's core before the message leaves.
        sent: bytes that a host sends to others.
        messages: how many go one after the other.
    """

    coding_s: float
    sent: float
    messages: int


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """An exchange of all values.

    Attributes:
        stages: one or two; the second waits for backward's end, because it begins when its result is waited for.
        after_s: seconds of a rank's core, for each byte of values, once the last message is there.
        road: "ring", "gathers" or "servers": the kind of its messages.
        is_hidden: whether the first stage goes on during backward.
        every: steps from one exchange to the next.
        overlap: of these, how many go on during an exchange.
    """

    stages: tuple[Stage, ...]
    after_s: float = 0.0
    road: str = "ring"
    is_hidden: bool = True
    every: int = 1
    overlap: int = 0

    @property
    def sent(self) -> float:
        """Bytes that a host sends in a step, for each byte of values."""
        return sum(stage.sent for stage in self.stages) / self.every


def codec_of(strategy: str) -> Codec | None:
    """The codec that a strategy's ``compress=`` names; None without one."""
    options = Specification.parse("strategy", strategy).options
    name = options.get("compress")
    if name in (None, "none"):
        return None
    if name == "auto" or name not in CODECS:
        raise ConfigurationError(f"strategy {strategy!r} (expected a codec by its name, got compress={name})")
    return CODECS[name](**{key: options[key] for key in CODECS.options_of(name) if key in options})


def traffic(strategy: str, hosts: int, ranks_per_host: int = 1, coding: Coding = PLAIN) -> Traffic:
    """What an exchange of ``strategy`` costs; "hierarchical" is that collective under "sync".

    Args:
        strategy: as users write it.
        hosts: H.
        ranks_per_host: K.
        coding: of the strategy's codec.

    Raises:
        ConfigurationError: there is no such strategy or codec.
    """
    if strategy == HIERARCHICAL:
        between = (hosts - 1) / hosts
        trade, collect = (Stage(coding_s=0.0, sent=between, messages=messages) for messages in (1, hosts - 1))
        # Its pieces of 4 MiB keep the link busy, as a ring does.
        return Traffic(stages=(trade, collect))
    named = Specification.parse("strategy", strategy)
    codec = codec_of(strategy)
    # Raises where there is no such strategy.
    is_local = "every" in STRATEGIES.options_of(named.name)
    every = int(named.options.get("every", _default_every(named.name))) if is_local else 1
    if named.name == "async" or named.name.endswith("-server"):
        # Only under sync-server averages come back during backward; async sends in optimizer.step().
        to_and_fro = _through_servers(hosts, ranks_per_host, coding)
        is_hidden = named.name == "sync-server"
        return Traffic(
            stages=to_and_fro,
            after_s=coding.decode_s,
            road="servers",
            is_hidden=is_hidden and not is_local,
            every=every,
        )
    stages, after_s = _over_ranks(codec, hosts, ranks_per_host, coding)
    return Traffic(
        stages=stages,
        after_s=after_s,
        road="ring" if codec is None or codec.summed_dtype(torch.float32) or codec.is_summed_in_rounds else "gathers",
        is_hidden=not is_local,
        every=every,
        overlap=int(named.options.get("overlap", 0)),
    )


def _default_every(name: str) -> int:
    return int(inspect.signature(STRATEGIES[name]).parameters["every"].default)


def _through_servers(hosts: int, ranks_per_host: int, coding: Coding) -> tuple[Stage, ...]:
    """Pushes to the shards of other hosts, and their answers."""
    sent = ranks_per_host * (hosts - 1) / hosts * coding.payload
    # The shard decodes the pushes of all workers, which are as many values as this host's workers have.
    served_s = ranks_per_host * coding.decode_add_s + coding.encode_s / hosts
    return (
        Stage(coding_s=coding.encode_s, sent=sent, messages=1),
        Stage(coding_s=served_s, sent=sent, messages=1),
    )


def _over_ranks(
    codec: Codec | None, hosts: int, ranks_per_host: int, coding: Coding
) -> tuple[tuple[Stage, ...], float]:
    """(stages, seconds after them) of a codec over a collective; see ``strategies/bucket_exchange.py``."""
    ranks = hosts * ranks_per_host
    around = (ranks - 1) / ranks * coding.payload
    if codec is None or codec.summed_dtype(torch.float32) is not None:
        return (Stage(coding_s=0.0, sent=2 * around, messages=2 * (ranks - 1)),), 0.0
    if codec.is_summed_in_rounds:
        # What is encoded is the sum, in two rounds; decoding is part of it.
        half = Stage(coding_s=coding.encode_s / 2, sent=around, messages=2 * (ranks - 1))
        return (half, half), 0.0
    if codec.slice_numel is not None:
        across = ranks_per_host * (ranks - ranks_per_host) / ranks * coding.payload
        own_s = coding.decode_add_s + coding.encode_s / ranks
        trade = Stage(coding_s=coding.encode_s, sent=across, messages=1)
        return (trade, Stage(coding_s=own_s, sent=around, messages=ranks - 1)), coding.decode_s
    gather = Stage(coding_s=coding.encode_s, sent=(ranks - 1) * coding.payload, messages=ranks - 1)
    return (gather,), coding.decode_s + (ranks - 1) * coding.decode_add_s
