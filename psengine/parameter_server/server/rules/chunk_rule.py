"""The rule of one chunk: what contributions lead to, and when answers may leave. Pure, and without a clock.

average.py    every member of the view has contributed, or those that the coordinator named: one answer for all
apply.py      each contribution is applied when it comes; its answer may be held (bounded staleness)
merge.py      contributions are merged as the coordinator names them

The last two keep the weights and step them (``server_weights.py``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from psengine.errors import ProtocolError
from psengine.flat_optimizers.optimizers import ChunkOptimizer, OptimizerSpec
from psengine.parameter_server.server.rules.answer_memory import AnswerMemory, Place
from psengine.parameter_server.server.rules.exchange import Contribution, Reply, RuleContext
from psengine.parameter_server.server.rules.payloads import ChunkPayloads
from psengine.protocol.layout import ChunkKind, ChunkSpec
from psengine.protocol.messages import ErrorCode, MessageType
from psengine.protocol.views import Release, View


class ChunkRule(ABC):
    """Of one chunk at one shard.

    Args:
        values: 1-D, the chunk's values; owned and mutated here. None where nobody has brought any.
        context: shared with the job's other chunks.
        options: the rule as in HELLO.
    """

    # Whether the weights that are trained are here; else they are in the workers, who deposit copies for each other.
    holds_weights: ClassVar[bool]
    # Which chunks workers push.
    pushed_kinds: ClassVar[frozenset[ChunkKind]]
    # Whether the job's codec may encode answers; else they are exact, whatever it is.
    encodes_answers: ClassVar[bool] = True

    def __init__(
        self,
        spec: ChunkSpec,
        values: torch.Tensor | None,
        payloads: ChunkPayloads,
        context: RuleContext,
        options: Mapping[str, Any],
    ) -> None:
        self.spec = spec
        self.payloads = payloads
        self.context = context
        self.options = options
        self.version = 0
        self.memory = AnswerMemory(spec.numel, spec.dtype)
        self.optimizer: ChunkOptimizer | None = None

    @property
    @abstractmethod
    def values(self) -> torch.Tensor | None:
        """What PULL reads; None where nobody has brought any."""

    @property
    def remembers_answers(self) -> bool:
        """Whether an answer, or a read by a member, changes what later answers are."""
        return False

    def configure(self, spec: OptimizerSpec) -> None:
        """Attach the optimizer; a repetition of the same is no change.

        Raises:
            ProtocolError: another one is attached, or the chunk takes none.
        """
        raise ProtocolError(
            f"{self.spec.describe()} takes no optimizer (expected a parameter of a job whose servers step)",
            ErrorCode.RULE_MISMATCH,
        )

    @abstractmethod
    def push(self, contribution: Contribution) -> list[Reply]:
        """A contribution of a member arrived, which ``has`` does not know.

        Raises:
            ProtocolError: it makes no sense here; nothing has changed.
        """

    @abstractmethod
    def adopt(self, view: View) -> list[Reply]:
        """Others take part from now on; the view's releases come next. Answers that may leave now."""

    @abstractmethod
    def release(self, release: Release) -> list[Reply]:
        """The coordinator has decided something, perhaps told once more. Answers that may leave now."""

    @abstractmethod
    def has(self, rank: int, step: int) -> bool:
        """Whether the contribution of this member is here or has been answered: nobody needs to push it again."""

    @abstractmethod
    def answer_again(self, rank: int, step: int) -> Reply | None:
        """The answer of a contribution that is here, if there is one already: the first may be lost."""

    @abstractmethod
    def waiting_for(self, rank: int, step: int) -> list[int]:
        """The ranks whose contributions or commits the answer of this contribution waits for, ascending."""

    @abstractmethod
    def open_steps(self) -> dict[int, int]:
        """By rank, the last step whose contribution is here and not answered."""

    def supply_result(self, rank: int, step: int, payload: torch.Tensor, contributors: int | None) -> list[Reply]:
        """Member ``rank`` returns the average of a step that was closed before this server started.

        Raises:
            ProtocolError: nobody lacks it.
        """
        raise ProtocolError(f"{self.spec.describe()}: nobody lacks the average of step {step}")

    @abstractmethod
    def read(self) -> tuple[int, torch.Tensor]:
        """(version, values) as PULL reads them; ProtocolError where there are none."""

    @abstractmethod
    def store(self, values: torch.Tensor, version: int) -> None:
        """STORE: overwrite what PULL reads; ``version``: as the worker says."""

    def note_base(self, rank: int) -> int:
        """Worker ``rank`` computes its next gradient from the values as they are: their version, 0 if unknown here."""
        return 0

    @abstractmethod
    def lent_places(self, workers: int) -> int:
        """In how many places answers to ``workers`` of this host are made, if one is to be free whenever one is needed;
        0 where they may not read answers where they are made.
        """

    @abstractmethod
    def size_bytes(self) -> int:
        """Memory of values, contributions that are kept, results, optimizer and backups."""

    @abstractmethod
    def to_meta(self) -> dict[str, Any]:
        """All that is here beside the tensors; JSON-able."""

    @abstractmethod
    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors that are here, by name; not copies."""

    @abstractmethod
    def restore(self, meta: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Inverse of ``to_meta`` and ``tensors``, which are owned here from now on; the values are here already."""

    def begin_life(self) -> None:  # noqa: B027 - others have nothing to forget
        """The server has restarted: what follows may differ from what workers were told by its former life."""

    def _updated(self, rank: int, step: int, version: int, place: Place, **body: Any) -> Reply:
        return Reply(MessageType.UPDATED, rank, step, version, place.values, body, self.spec.key, place)
