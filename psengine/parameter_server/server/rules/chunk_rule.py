"""The rule of one chunk: what contributions lead to, and when answers may leave. Pure, and without a clock.

average.py    every member of the view has contributed, or those that the coordinator named: one answer for all
apply.py      each contribution is applied when it comes; its answer may be held (bounded staleness)
merge.py      contributions are merged as the coordinator names them
rows.py       both of these for a part of a table

All but the first keep the weights and step them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from msgspec import convert, to_builtins

from psengine.errors import ProtocolError
from psengine.flat_optimizers.optimizers import ChunkOptimizer, OptimizerSpec
from psengine.parameter_server.server.rules.answer_memory import AnswerMemory, Place
from psengine.parameter_server.server.rules.exchange import Contribution, Reply, RuleContext
from psengine.parameter_server.server.rules.payloads import ChunkPayloads, HeldWeights
from psengine.parameter_server.server.snapshots.files import ChunkState
from psengine.protocol.bodies import learn
from psengine.protocol.layout import ChunkKind, ChunkSpec
from psengine.protocol.messages import ErrorCode, Message, MessageType
from psengine.protocol.views import Release, View


@dataclass(slots=True)
class KnownWorker:
    """What a chunk knows of a worker's process."""

    incarnation: int
    step: int = 0  # the last that was taken in, or that it does not need
    is_waiting: bool = False  # its answer is held until others are as far
    # Pushes computed from older versions were under way when it was put out of the view; None: it is out.
    oldest_base: int | None = 0
    refused: str | None = None  # why its last contribution does not count
    held: HeldWeights | None = None  # where later answers depend on it
    ahead: int = 0  # how many steps before the last one it asked for the rows that it computed with
    bad_row: int = 0  # of a table: the first for which its last contribution was refused


class ChunkRule(ABC):
    """Of one chunk at one shard.

    Args:
        values: 1-D, the chunk's values; owned and mutated here. None where nobody has brought any.
        context: shared with the job's other chunks.

    Attributes:
        values: what PULL reads; None where nobody has brought any.
        workers: by rank; also of some that are in no view.
    """

    # Whether the weights that are trained are here; else they are in the workers, who deposit copies for each other.
    holds_weights: ClassVar[bool]
    # Whether the job's codec may encode answers; else they are exact, whatever it is.
    encodes_answers: ClassVar[bool] = True
    # What a snapshot has beside weights and optimizer: attributes, and their types.
    kept: ClassVar[dict[str, Any]] = {"version": int}

    def __init_subclass__(cls) -> None:
        learn(cls.kept.values())  # a follower's shards all restore their first copy at once

    def __init__(self, spec: ChunkSpec, values: torch.Tensor | None, context: RuleContext) -> None:
        self.spec = spec
        self.values = values
        self.context = context
        self.payloads = ChunkPayloads(spec, context.codec)
        self.version = 0
        self.workers: dict[int, KnownWorker] = {}
        # By rank, incarnation and id of the last STORE: its repetition must not undo what came after it.
        self.stores: dict[int, tuple[int, int]] = {}
        self.memory = AnswerMemory(spec.numel, spec.dtype)
        self.optimizer: ChunkOptimizer | None = None

    def configure(self, spec: OptimizerSpec) -> None:
        """Attach the optimizer; a repetition of the same is no change.

        Raises:
            ProtocolError: another one is attached, or the chunk takes none.
        """
        if not self.holds_weights or self.spec.kind is not ChunkKind.PARAMETER:
            raise ProtocolError(
                f"{self.spec.describe()} takes no optimizer (expected a parameter of a job whose servers step)",
                ErrorCode.RULE_MISMATCH,
            )
        if self.optimizer is None:
            assert self.values is not None
            self.optimizer = ChunkOptimizer(self.values, spec)
            return
        known = self.optimizer.spec
        # Hyperparameters may differ, and change.
        if (known.name, len(known.groups), known.runs) != (spec.name, len(spec.groups), spec.runs):
            raise ProtocolError(
                f"{self.spec.describe()} has another optimizer already (expected {known.name} of {len(known.groups)}"
                f" groups over {len(known.runs)} runs, got {spec.name} over {len(spec.runs)} runs). Every worker of a"
                " job needs the same optimizer and parameter groups.",
                ErrorCode.RULE_MISMATCH,
            )

    def received(self, message: Message, contribution: Contribution) -> Contribution:
        """The contribution with what the payload of its PUSH brings.

        Raises:
            ProtocolError: that makes no sense here.
        """
        return contribution._replace(values=self.payloads.decode(message))

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

    def has(self, rank: int, step: int) -> bool:
        """Whether the contribution of this member is here or has been answered: nobody needs to push it again."""
        return rank in self.workers and step <= self.workers[rank].step

    @abstractmethod
    def answer_again(self, rank: int, step: int) -> Reply | None:
        """The answer of a contribution that is here, if there is one already: the first may be lost."""

    @abstractmethod
    def waits(self) -> dict[int, list[int]]:
        """By rank whose contribution is not answered, those whose contributions or commits its answer waits for."""

    def supply_result(self, step: int, payload: torch.Tensor | None, contributors: int | None) -> list[Reply]:
        """The donor returns the average of the last step before the view, for a server that restarted."""
        return []

    @abstractmethod
    def read(self) -> tuple[int, torch.Tensor]:
        """(version, values) as PULL reads them; ProtocolError where there are none."""

    @abstractmethod
    def store(self, values: torch.Tensor, version: int) -> None:
        """STORE: overwrite what PULL reads; ``version``: as the worker says."""

    def note_base(self, rank: int) -> bool:
        """Worker ``rank`` computes its next gradient from the values as they are; whether a snapshot has that."""
        return False

    def take_back(self) -> None:
        """Nobody reads answers in lent memory any more: let go of it."""
        self.memory.lend(())

    @abstractmethod
    def lent_places(self) -> int:
        """In how many places answers to workers of this host are made, if one is to be free whenever one is needed;
        0 where they may not read answers where they are made.
        """

    @abstractmethod
    def size_bytes(self) -> int:
        """Memory of values, contributions that are kept, results, optimizer and backups."""

    def capture(self, generation: int = 0, kept: Collection[int] = ()) -> ChunkState:
        """All that lasts: what is JSON-able, and copies of tensors, for which it has their names.

        A table has only the rows that changed, where earlier generations have the others.

        Args:
            generation: of which it will be part; 0: of none, but whole.
            kept: earlier ones of this life of the server that have rows, on the disk.
        """
        tensors: dict[str, torch.Tensor] = {}

        def name_of(tensor: torch.Tensor) -> str:
            name = str(len(tensors))
            tensors[name] = tensor.clone()
            return name

        meta: dict[str, Any] = {"spec": self.spec.to_body()}
        if self.holds_weights and self.values is not None:
            tensors["values"] = self.values.clone()
        if self.optimizer is not None:
            # With the current hyperparameters.
            meta |= {"optimizer": self.optimizer.spec.to_body(), "steps": self.optimizer.steps()}
            tensors |= {f"slot/{name}": slot.clone() for name, slot in self.optimizer.slots().items()}
        fields = {name: getattr(self, name) for name in self.kept}
        meta |= to_builtins(fields, str_keys=True, enc_hook=name_of)
        return ChunkState(self.spec.key, meta, tensors)

    def restore(self, state: ChunkState) -> None:
        """Inverse of ``capture`` in a new object, which has the values already and owns the other tensors now."""
        meta, tensors = state.meta, state.tensors
        for name, kind in self.kept.items():
            setattr(self, name, convert(meta[name], kind, str_keys=True, dec_hook=lambda _, key: tensors[key]))
        if "optimizer" in meta:
            self.configure(OptimizerSpec.from_body(meta["optimizer"], self.spec.numel))
            assert self.optimizer is not None
            for name, tensor in tensors.items():
                if name.startswith("slot/"):
                    self.optimizer.load_slot(name.removeprefix("slot/"), tensor, meta["steps"])

    def begin_life(self, *, keeps_log: bool) -> None:  # noqa: B027 - others have nothing to forget
        """The server has restarted: what follows may differ from what workers were told by its former life."""

    def _updated(self, rank: int, step: int, version: int, place: Place | None, **body: Any) -> Reply:
        payload = None if place is None else place.values
        return Reply(MessageType.UPDATED, rank, step, version, payload, body, self.spec.key, place)
