"""The rules that a job may name in HELLO: each is a aggregation times an outcome, one line here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from psengine.parameter_server.chunk_codecs import only_gradients
from psengine.parameter_server.server.rules.apply import Apply
from psengine.parameter_server.server.rules.average import Average
from psengine.parameter_server.server.rules.average_outcome import AverageOutcome
from psengine.parameter_server.server.rules.chunk_rule import ChunkRule
from psengine.parameter_server.server.rules.exchange import RuleContext
from psengine.parameter_server.server.rules.merge import Merge
from psengine.parameter_server.server.rules.outcome import Outcome
from psengine.parameter_server.server.rules.payloads import ChunkPayloads, codec_of
from psengine.parameter_server.server.rules.step import StepOutcome
from psengine.protocol.layout import ChunkSpec


class RuleKind(NamedTuple):
    """The halves of a rule."""

    aggregation: type[ChunkRule]
    outcome: type[Outcome]
    # Whether the job's codec may encode answers; else they are exact, whatever it is.
    encodes_answers: bool = True


RULES = {
    "average": RuleKind(Average, AverageOutcome),
    "apply": RuleKind(Apply, StepOutcome),
    "merge": RuleKind(Merge, StepOutcome, encodes_answers=False),
}


class JobRule:
    """The rule of one job; ``body``, as in HELLO, names it, its codec, and the options of its halves.

    Raises:
        ProtocolError: this server knows no such codec.
    """

    def __init__(self, body: Mapping[str, Any]) -> None:
        self.body = dict(body)
        self.kind = RULES[self.body["name"]]
        codec = codec_of(self.body)
        self._codec = codec if self.kind.encodes_answers else only_gradients(codec)

    @property
    def holds_weights(self) -> bool:
        """See ``Outcome.holds_weights``."""
        return self.kind.outcome.holds_weights

    def make(self, spec: ChunkSpec, values: torch.Tensor | None, context: RuleContext) -> ChunkRule:
        """The rule of one chunk; ``values`` are owned by it.

        Raises:
            ProtocolError: it needs values, and there are none.
        """
        aggregate, concludes, _ = self.kind
        payloads = ChunkPayloads(spec, self._codec)
        return aggregate(concludes(spec, values, payloads, context.statistics, self.body), context, self.body)
