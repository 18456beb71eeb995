"""Bugs of answers that a codec made."""

from __future__ import annotations

from typing import Any

from psengine.parameter_server.server.rules.average_outcome import AverageOutcome

from psengine.parameter_server.server.rules.exchange import Reply
from psengine.parameter_server.server.rules.held_weights import HeldWeights
from psengine.parameter_server.server.rules.payloads import ChunkPayloads
from simulation.planted.registry import plant


def _encodes_again(answer: Any) -> Any:
    def one(self: HeldWeights, rank: int, sequence: int, version: int, weights: Any, *, repeated: bool) -> Any:
        known = self._held.get(rank)
        if known is not None and known.sequence == sequence:
            known.sequence -= 1
        return answer(self, rank, sequence, version, weights, repeated=False)

    return one


plant("a repeated difference is another one", HeldWeights, "answer", _encodes_again)


def _encodes_for_each(answer: Any) -> Any:
    def one(self: AverageOutcome, rank: int, sequence: int, *, repeated: bool = False) -> Reply:
        reply = answer(self, rank, sequence, repeated=repeated)
        if repeated and self.payloads.encodes_answers and reply.payload is not None:
            reply.payload = reply.payload.clone().fill_(0)
        return reply

    return one


plant("a repeated average is another one", AverageOutcome, "answer", _encodes_for_each)


def _all_arrives(encode_difference: Any) -> Any:
    def one(self: ChunkPayloads, weights: Any, held: Any) -> Any:
        payload = encode_difference(self, weights, held)
        held.copy_(weights)
        return payload

    return one


plant("a server forgets what a difference leaves out", ChunkPayloads, "encode_difference", _all_arrives)
