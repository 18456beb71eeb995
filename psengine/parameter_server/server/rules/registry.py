"""The rules that a job may name in HELLO, one line each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from psengine.parameter_server.chunk_codecs import only_gradients
from psengine.parameter_server.server.rules.apply import Apply
from psengine.parameter_server.server.rules.average import Average
from psengine.parameter_server.server.rules.chunk_rule import ChunkRule
from psengine.parameter_server.server.rules.exchange import RuleContext
from psengine.parameter_server.server.rules.merge import Merge
from psengine.parameter_server.server.rules.payloads import ChunkPayloads, codec_of
from psengine.protocol.layout import ChunkSpec

RULES: dict[str, type[ChunkRule]] = {"average": Average, "apply": Apply, "merge": Merge}


class JobRule:
    """The rule of one job; ``body``, as in HELLO, names it, its codec, and its options.

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
        """See ``ChunkRule.holds_weights``."""
        return self.kind.holds_weights

    def make(self, spec: ChunkSpec, values: torch.Tensor | None, context: RuleContext) -> ChunkRule:
        """The rule of one chunk; ``values`` are owned by it.

        Raises:
            ProtocolError: it needs values, and there are none.
        """
        return self.kind(spec, values, ChunkPayloads(spec, self._codec), context, self.body)
