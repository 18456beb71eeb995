"""Rows of tables that are larger than a worker: csrc/tables. Only native: see ``refusal``.

Ids are int64, rows and gradients float32, on the CPU and contiguous. Every call checks its tensors, and raises
ValueError before it changes anything.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from psengine.environment.installation import BUILD_COMMAND
from psengine.kernels import native
from psengine.kernels.ops import native_available

# csrc/tables/row_table.h, RowOptimizer
_NUMBERS = {"sgd": 0, "adagrad": 1, "rowwise_adagrad": 2}
_KEY_BITS = 64


def refusal() -> str:
    """Why this process cannot keep tables, in a sentence; empty where it can."""
    if native_available():
        return ""
    return f"tables need psengine's native extension ({native.reason}). Fix: {BUILD_COMMAND}, with a C++ compiler."


class RowTable:
    """The rows of one part of a table, with their optimizer's state. One thread at a time may use it.

    Element j of an absent row is ``std * (sum of the four 16-bit parts of h, less 131070) / 37837.2``: variance 1
    before ``std``; h is number j + 1 of SplitMix64 begun at SipHash-1-3(key ``(seed, number)``, id).

    Args:
        dim: elements of a row, 1 to 65536.
        optimizer: "sgd" and "adagrad" have the bits of torch.optim's sparse steps; "rowwise_adagrad" adds the mean of
            the gradient's squares to the row's one accumulator a, then ``row -= lr / (sqrt(a) + eps) * gradient``.
        eps: of the two Adagrads.
        seed, number: of the table; any integers, of which 64 bits count.
        std: of the values of absent rows.

    Attributes:
        state_numel: float32 numbers of state that a row has.
    """

    def __init__(self, dim: int, *, optimizer: str, eps: float, seed: int, number: int, std: float) -> None:
        self.dim = dim
        self.state_numel = {"sgd": 0, "adagrad": dim, "rowwise_adagrad": 1}[optimizer]
        self._row_bytes = 16 + 4 * (dim + self.state_numel + 1) // 8 * 8
        keys = (seed % 2**_KEY_BITS, number % 2**_KEY_BITS)
        self._table = native.extension.row_table(dim, _NUMBERS[optimizer], eps, *keys, std)

    @property
    def rows(self) -> int:
        """Rows that exist."""
        return int(native.extension.row_table_rows(self._table))

    @property
    def size_bytes(self) -> int:
        """Memory that was touched, with the index."""
        return int(native.extension.row_table_bytes(self._table))

    def bytes_with(self, rows: int) -> int:
        """What ``size_bytes`` is with so many rows, if no slot is free and none was evicted."""
        # At most half of the index's places, of 8 bytes, are taken; its size is a power of two.
        return rows * self._row_bytes + (16 << max(0, rows - 1).bit_length())

    def gather(self, ids: Tensor, out: Tensor) -> None:
        """Write the rows of ``ids`` to ``out`` ([n, dim], mutated); absent rows are computed and stay absent."""
        native.extension.row_table_gather(self._table, *_ids(ids), _floats(out, len(ids), self.dim))

    def count_absent(self, ids: Tensor) -> int:
        """How many of ``ids`` have no row."""
        return int(native.extension.row_table_count_absent(self._table, *_ids(ids)))

    def step(self, ids: Tensor, gradients: Tensor, lr: float, stamp: int) -> None:
        """Step the rows of ``ids`` (ascending, none twice) with ``gradients``; absent rows exist from now on.

        ``stamp``, not negative, is from now on that of each of these rows.
        """
        rows = _floats(gradients, len(ids), self.dim)
        native.extension.row_table_step(self._table, *_ids(ids), rows, lr, stamp)

    def store(self, ids: Tensor, rows: Tensor, stamp: int) -> None:
        """Overwrite or insert rows; their state is 0."""
        self.restore(ids, rows, torch.zeros(len(ids), self.state_numel), torch.full((len(ids),), stamp))

    def restore(self, ids: Tensor, rows: Tensor, states: Tensor, stamps: Tensor) -> None:
        """Overwrite or insert rows as ``changed_since`` returned them."""
        values = (_floats(rows, len(ids), self.dim), _floats(states, len(ids), self.state_numel))
        native.extension.row_table_store(self._table, *_ids(ids), *values, _address(stamps, torch.int64, len(ids)))

    def evict(self, count: int, keep: Tensor) -> Tensor:
        """Remove up to ``count`` rows, those of the lowest stamps and then ids, but none of ``keep`` (ascending).

        Returns the ids that went, in this order.
        """
        gone = torch.empty(min(count, self.rows), dtype=torch.int64)
        return gone[: native.extension.row_table_evict(self._table, len(gone), *_ids(keep), gone.data_ptr())]

    def changed_since(self, stamp: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Copies of ids, rows, states and stamps of all rows with a later stamp; -1: of all rows."""
        slots = native.extension.row_table_slots(self._table)
        count = native.extension.row_table_read(self._table, 0, slots, stamp + 1, 0, 0, 0, 0)
        return self._read(0, slots, stamp + 1, count)

    def scan(self, start: int, most: int) -> tuple[Tensor, Tensor, int | None]:
        """Copies of ids and rows in ``most`` slots from ``start`` on, and the slot to go on from; None at the end."""
        slots = native.extension.row_table_slots(self._table)
        end = min(start + most, slots)
        ids, rows, _, _ = self._read(start, end, 0, max(end - start, 0))
        return ids, rows, end if end < slots else None

    def _read(self, begin: int, end: int, least_stamp: int, most: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        ids, stamps = torch.empty(2, most, dtype=torch.int64)
        rows, states = torch.empty(most, self.dim), torch.empty(most, self.state_numel)
        addresses = (tensor.data_ptr() for tensor in (ids, rows, states, stamps))
        count = native.extension.row_table_read(self._table, begin, end, least_stamp, *addresses)
        return ids[:count], rows[:count], states[:count], stamps[:count]


def part_of(ids: Tensor, parts: int, seed: int) -> Tensor:
    """The part, below ``parts``, that has each row: int64. SipHash-1-3, on every machine alike."""
    if not 0 < parts < 2**32:
        raise ValueError(f"a table has 1 to 2**32 - 1 parts (got {parts})")
    found = torch.empty(len(ids), dtype=torch.int64, device="cpu")
    native.extension.find_parts(*_ids(ids), parts, seed % 2**_KEY_BITS, found.data_ptr())
    return found


def sum_by_row(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The sum of the rows of each id, added in the order of ``pairs``, and the ids ascending.

    Args:
        pairs: at least one; ids (ascending, none twice) and their rows [n, dim].
    """
    if len(pairs) == 1:
        return pairs[0]
    dim = pairs[0][1].shape[1]
    runs: list[int] = []
    for ids, rows in pairs:
        runs += [*_ids(ids), _floats(rows, len(ids), dim)]
    most = sum(len(ids) for ids, _ in pairs)
    found, total = torch.empty(most, dtype=torch.int64), torch.empty(most, dim)
    count = native.extension.sum_rows(runs, dim, found.data_ptr(), total.data_ptr())
    return found[:count], total[:count]


def first_not_finite(rows: Tensor) -> int:
    """Which of ``rows`` [n, dim] is the first with NaN or infinity; -1 where all are finite."""
    if native.extension.all_finite(0, rows.numel(), _floats(rows, *rows.shape)):
        return -1
    return int(rows.isfinite().all(dim=1).logical_not_().to(torch.uint8).argmax())


def _ids(ids: Tensor) -> tuple[int, int]:
    return _address(ids, torch.int64, ids.numel()), ids.numel()


def _floats(values: Tensor, *shape: int) -> int:
    return _address(values, torch.float32, *shape)


def _address(tensor: Tensor, dtype: torch.dtype, *shape: int) -> int:
    """Where native code finds a tensor of this kind."""
    is_plain = tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.data_ptr() % dtype.itemsize == 0
    if tensor.dtype is not dtype or tensor.shape != shape or not is_plain:
        raise ValueError(
            f"a table takes contiguous, aligned tensors on the CPU (expected {dtype}, {list(shape)}; got"
            f" {tensor.dtype}, {list(tensor.shape)}, on {tensor.device})"
        )
    return tensor.data_ptr()
