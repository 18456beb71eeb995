"""What comes back from servers, as those who asked for it get it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from psengine.codecs.exchange_outcome import ExchangeOutcome


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back for a request.

    Attributes:
        version: the chunk's version at the server; 0 where it makes no sense.
        body: the answer's fields.
        values: 1-D, where the request named no destinations and there is a payload.
        key: the chunk's, or the blob piece's, number.
    """

    version: int = 0
    body: dict[str, Any] = field(default_factory=dict)
    values: torch.Tensor | None = None
    key: int = 0


@dataclass(frozen=True, slots=True)
class PushResult:
    """What came of a push; its values are in the destinations.

    Attributes:
        version: of the chunk, now that the push is in.
        contributors: how many workers' gradients the average is made of; None where servers apply updates.
        refused: why the server did not use it ("non_finite"); None where it did.
        outcome: whether it counts, and if not, why.
        seconds: from ``push()`` to the answer.
    """

    version: int
    contributors: int | None
    refused: str | None
    outcome: ExchangeOutcome
    seconds: float
