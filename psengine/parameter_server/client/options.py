"""A client's options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from psengine.codecs.base import Codec
from psengine.codecs.identity import IDENTITY
from psengine.environment.variables import continues_training
from psengine.errors import ConfigurationError
from psengine.protocol.keys import CurveClientKeys


@dataclass(frozen=True, kw_only=True)
class SessionOptions:
    """The options of a session.

    Attributes:
        addresses: of each server, as ``parse_addresses`` returns them; the first is the lead.
        job: name of the job; workers of one job share its values.
        rule: the job's update rule, as in HELLO, without its codec; None: a reader, or who only reserves a rank.
        codec: encodes gradients and the answers to them.
        run: the launch that this process belongs to; "" where none is named. A job that has ended lets nobody of its
            runs in again.
        continues: go on from values that another run has trained.
        rank: this worker; None lets the coordinator choose.
        nonce: by which the coordinator knows this process; None draws one.
        world_size: workers expected at the start.
        timeout_s: deadline of every request and push.
        connect_timeout_s: deadline of the first answer of each server.
        credit_bytes: of pushes that may be on their way to a server and unanswered; None: by the number of servers.
        keys: CURVE keys; None speaks in the clear.
        is_embedded: a worker on this host started the server: once nothing listens there, it does not come back.
        uses_local_socket: connect to the Unix socket beside an address of this host, where this user's server has one.
        uses_segments: share memory with servers on this host, so that gradients, averages and weights are not sent.
            PSENGINE_SEGMENTS=0 turns it off too.
        keeps_step: workers take every step together; who has missed some cannot go on.
        follows_lead: ask who leads a server, wherever that is; else its process at that very address.
    """

    addresses: Sequence[str]
    job: str = "default"
    rule: dict[str, Any] | None = None
    codec: Codec = IDENTITY
    run: str = ""
    continues: bool = field(default_factory=continues_training)
    rank: int | None = None
    nonce: int | None = None
    world_size: int = 1
    timeout_s: float = 300.0
    connect_timeout_s: float = 30.0
    credit_bytes: int | None = None
    keys: CurveClientKeys | None = None
    is_embedded: bool = False
    uses_local_socket: bool = True
    uses_segments: bool = True
    keeps_step: bool = False
    follows_lead: bool = True

    @property
    def averages(self) -> bool:
        """Whether the job's servers average, so that its weights live in its workers."""
        return self.rule is None or self.rule["name"] == "average"

    @property
    def has_decisions(self) -> bool:
        """Whether the coordinator decides something about a step, and hears when its pushes are at the shards."""
        rule = self.rule or {}
        return "quorum" in rule or rule.get("max_staleness") is not None

    @property
    def merges(self) -> bool:
        """Whether contributions wait at the servers for those that are stepped together with them."""
        return self.rule is not None and self.rule["name"] == "merge"

    @property
    def whole_rule(self) -> dict[str, Any]:
        """The rule as HELLO says it."""
        assert self.rule is not None, "a reader says none"
        return self.rule if self.codec.is_identity else {**self.rule, "compress": repr(self.codec)}

    def __post_init__(self) -> None:
        """Raise ConfigurationError for timeouts that are none."""
        if not 0 < self.timeout_s < 1e9 or not 0 < self.connect_timeout_s < 1e9:
            raise ConfigurationError(
                f"timeouts must be positive and finite (got timeout_s={self.timeout_s},"
                f" connect_timeout_s={self.connect_timeout_s})"
            )
