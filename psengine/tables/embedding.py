"""``ServerEmbedding`` and ``ServerEmbeddingBag``: what a model has in place of ``torch.nn.Embedding``."""

from __future__ import annotations

import os
from typing import Annotated, Any

import torch
from msgspec import Meta, Struct, to_builtins
from torch.nn import functional as F
from typing_extensions import override

from psengine.errors import ConfigurationError, ModuleError, ProtocolError
from psengine.protocol.bodies import convert
from psengine.protocol.bounds import INT64_MAX, Positive, Printable, Unsigned, one_of
from psengine.protocol.layout import MAX_TABLE_DIM, TABLE_OPTIMIZERS, Single
from psengine.tables.table import Table

RULES = ("async", "average")


class TableOptions(
    Struct, forbid_unknown_fields=True, kw_only=True, rename={"rows": "num_embeddings", "dim": "embedding_dim"}
):
    """What users choose, see ``ServerEmbedding``; the first fields are named as in ``TableSpec``."""

    rows: Positive
    dim: Annotated[int, Meta(ge=1, le=MAX_TABLE_DIM)]
    optimizer: Annotated[str, one_of(*TABLE_OPTIMIZERS)]
    eps: Single
    seed: Unsigned
    std: Single
    name: Printable | None
    padding_idx: int | None
    max_rows: Positive | None
    lr: Single
    rule: Annotated[str, one_of(*RULES)]
    max_staleness: Unsigned | None

    def __post_init__(self) -> None:
        """Check that the padding is a row, and that elements can be counted."""
        if self.padding_idx is not None and not -self.rows <= self.padding_idx < self.rows:
            raise ValueError(f"`padding_idx` (expected {-self.rows} to {self.rows - 1}, got {self.padding_idx})")
        if self.rows * self.dim > INT64_MAX:
            raise ValueError(f"has too many elements (expected at most {INT64_MAX}, got {self.rows * self.dim})")


class ServerEmbedding(torch.nn.Module):
    """``torch.nn.Embedding`` whose rows live on parameter servers; a worker holds those of its batch.

    Servers step its rows, with what ``psengine.DistributedOptimizer(...).step()`` pushes; ``clip_grad_norm_`` does not
    see their gradients. The model has to be wrapped in ``psengine.DistributedDataParallel``, under any strategy but
    virtual workers. A parameter of one element, ``stand_in``, takes the rows' place in ``parameters()``:
    ``requires_grad_``, ``zero_grad`` and ``half``, of the table or of a module around it, act as on
    ``torch.nn.Embedding``, but that servers keep float32 where forwards return another dtype.

    Args:
        num_embeddings: rows; ids are 0 to ``num_embeddings`` - 1. A row takes memory from its first push on.
        embedding_dim: elements of a row, float32.
        name: of the table at the servers; None: the path of the module in the wrapped model.
        padding_idx: a row of zeros without gradient, as in ``torch.nn.Embedding``.
        optimizer: "sgd" (without momentum), "adagrad" (torch.optim.Adagrad's, for sparse gradients) or
            "rowwise_adagrad" (one accumulator for each row: the sum of its gradients' mean squares).
        lr: learning rate; ``lr`` may be set at any time, and travels with each push.
        eps: of Adagrad.
        seed: of the first values: row r is a function of ``seed``, ``name`` and r.
        std: their standard deviation; 0 begins with zeros.
        max_rows: where servers have so many rows, those that were pushed longest ago go, and begin anew. None: servers
            keep all rows, and refuse pushes of new ones when their memory is full.
        rule: "async" steps each worker's rows when they arrive, "average" those of all workers together, as native DDP.
        max_staleness: of "async": how many steps a worker may be ahead of the slowest; None: any number.
        dtype: float32, or None.

    Raises:
        ConfigurationError: an argument has another value.
    """

    # Set while a wrapped model has this table.
    table: Table | None = None
    _loaded_version: int | None = None  # of the rows of the checkpoint that was loaded last

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        name: str | None = None,
        padding_idx: int | None = None,
        optimizer: str = "sgd",
        lr: float,
        eps: float = 1e-10,
        seed: int = 0,
        std: float = 1.0,
        max_rows: int | None = None,
        rule: str = "async",
        max_staleness: int | None = 8,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        given = {name: value for name, value in locals().items() if name not in ("self", "dtype", "__class__")}
        self.options: TableOptions = self._checked(given, TableOptions, "")
        if dtype not in (None, torch.float32):
            raise ConfigurationError(f"rows on servers are float32 (expected dtype=torch.float32, got {dtype})")
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        self.stand_in = torch.nn.Parameter(torch.zeros((), dtype=torch.float32))

    @property
    def lr(self) -> float:
        """The learning rate of the next push."""
        return self.options.lr

    @lr.setter
    def lr(self, lr: float) -> None:
        self.options.lr = self._checked(lr, Single, ".lr")

    def _checked(self, value: Any, wanted: Any, what: str) -> Any:
        try:
            return convert(value, wanted, type(self).__name__ + what)
        except ProtocolError as error:
            raise ConfigurationError(f"{error}. Fix: give such a value") from None

    def extra_repr(self) -> str:
        """Its options."""
        return ", ".join(f"{name}={value!r}" for name, value in to_builtins(self.options).items())

    @override
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of ``ids``: ``[*ids.shape, dim]``, on their device.

        Raises:
            RowIdError: the table has no such row.
            ModuleError: the model is not wrapped, or has left.
        """
        rows, index, padding = self.look_up(ids)
        return F.embedding(index, rows, padding, sparse=True)

    # ---- rows --------------------------------------------------------------------------------------------------

    def bound(self) -> Table:
        """The table at its servers.

        Raises:
            ModuleError: the model is not wrapped, or has left.
        """
        if self.table is None:
            raise ModuleError(
                f"the rows of {self} are at servers that this module does not know (expected a model wrapped in"
                " psengine.DistributedDataParallel that has not left, got none). Fix: wrap the model first, and use the"
                " table before model.leave(); or read its rows with psengine.connect(role='reader').rows(name, ids)."
            )
        return self.table

    def prefetch(self, ids: torch.Tensor) -> None:
        """Begin to read the rows of the next forward, which has to ask for equal ``ids``.

        Under "async" they are read at once, so they may lack one more step; under "average" when the step under way is
        over.

        Raises:
            ConfigurationError: ``max_staleness=0`` allows no row that is older.
        """
        self.bound().prefetch(ids)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of ``ids`` as the servers have them now: float32 ``[*ids.shape, dim]``, on their device."""
        return self.bound().parts.rows(ids)

    def load(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Overwrite rows; the optimizer's state of these begins anew. On one worker, between two steps.

        Args:
            ids: int64 or int32 [n], each once.
            rows: float32 [n, dim].

        Raises:
            ConfigurationError: an id is there twice, or the shapes do not fit.
        """
        self.bound().load(ids, rows)

    def export(self, path: str | os.PathLike[str]) -> None:
        """Write all rows that were pushed or loaded to a safetensors file: ``ids`` (int64, ascending) and ``rows``.

        On one worker, between two steps. Takes memory for the ids, not for the rows.
        """
        self.bound().export(path)

    def look_up(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int | None]:
        """The rows of a forward, each once, with their gradients' way; the place of each id's; that of the padding."""
        rows, lookup = self.bound().look_up(ids, self)
        return rows, lookup.index.view(ids.shape), lookup.padding

    # ---- checkpoints -------------------------------------------------------------------------------------------

    def get_extra_state(self) -> dict[str, Any]:
        """For ``state_dict``: which table it is, and the version of its rows, which stay at the servers."""
        name, version = self.options.name, self._loaded_version
        if self.table is not None:
            name, version = self.table.parts.spec.name, self.table.version
        shape = {"num_embeddings": self.num_embeddings, "embedding_dim": self.embedding_dim}
        return {"name": name, **shape, "version": version}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Compare the saved table with this one; rows are loaded by ``load``. Warns where they are of another version.

        Raises:
            ConfigurationError: it is another one.
        """
        self._loaded_version = state["version"]
        own = self.get_extra_state() | {"version": state["version"]}
        if own["name"] is None:  # not wrapped yet
            own["name"] = state["name"]
        if own != state:
            raise ConfigurationError(f"the checkpoint names another table (expected {own}, got {state})")
        if self.table is not None:
            self.table.check_version(state["version"])

    @override
    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, *lists: list[str]
    ) -> None:
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, *lists)
        if prefix + "weight" in state_dict:
            # Also where it is not ``strict``.
            lists[-1].append(
                f"{prefix}weight: rows live on servers (expected the state of a {type(self).__name__}, got that of a"
                f" torch.nn.Embedding). Fix: wrap the model, then .load(ids, rows) on one worker"
            )


class ServerEmbeddingBag(ServerEmbedding):
    """``torch.nn.EmbeddingBag`` with its rows on parameter servers.

    Args:
        num_embeddings, embedding_dim: see ``ServerEmbedding``.
        mode: "sum", "mean" or "max" of the rows of a bag.
        include_last_offset: as in ``torch.nn.EmbeddingBag``.
        **options: see ``ServerEmbedding``.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        mode: str = "mean",
        include_last_offset: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, **options)
        if mode not in ("sum", "mean", "max"):
            raise ConfigurationError(f"ServerEmbeddingBag.mode (expected 'sum', 'mean' or 'max', got {mode!r})")
        self.mode, self.include_last_offset = mode, include_last_offset

    @override
    def forward(
        self,
        input: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Arguments and result are those of ``torch.nn.EmbeddingBag``; errors those of ``ServerEmbedding``."""
        rows, index, padding = self.look_up(input)
        return F.embedding_bag(
            index,
            rows,
            offsets,
            mode=self.mode,
            sparse=self.mode != "max",  # which torch has for dense gradients only
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=padding,
        )
