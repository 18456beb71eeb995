"""Rows of a table as one payload: each id once, ascending, then the rows in the same order.

| ids, int64 | rows, float32, ``dim`` elements each |
"""

from __future__ import annotations

import torch

from psengine.errors import ProtocolError
from psengine.protocol.frames import payload_tensor
from psengine.protocol.layout import ID_BYTES, TableSpec
from psengine.protocol.messages import ErrorCode, Message


def pack_rows(ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The payload, 1-D uint8, of ``ids`` [n], ascending and unique, and contiguous ``rows`` [n, dim]."""
    return torch.cat([ids.view(torch.uint8), rows.reshape(-1).view(torch.uint8)])


def unpack_rows(message: Message, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids [n], rows [n, dim]) of the payload of a message whose body has ``rows``, n; views of it where it is aligned.

    Raises:
        ProtocolError: the payload has another size or type.
    """
    count, payload = message.body.get("rows"), message.payload
    if count is None:
        raise ProtocolError(f"{message.type.name} of a table lacks `rows`")
    wanted_bytes = count * (ID_BYTES + 4 * dim)
    if payload is None or message.dtype is not torch.uint8 or message.numel != wanted_bytes:
        got = "none" if payload is None else f"{message.numel} of {message.dtype}"
        raise ProtocolError(f"{message.type.name}: expected {wanted_bytes} bytes of {count} rows of {dim}, got {got}")
    values = payload_tensor(message)
    if values.data_ptr() % ID_BYTES or values.storage_offset() % ID_BYTES:
        values = values.clone()
    ids, rows = values[: count * ID_BYTES], values[count * ID_BYTES :]
    return ids.view(torch.int64), rows.view(torch.float32).view(count, dim)


def check_ids(ids: torch.Tensor, table: TableSpec, *, are_sorted: bool) -> None:
    """Raise ProtocolError unless these are ids of the table, and, if ``are_sorted``, ascending and unique."""
    if not len(ids):
        return
    least, largest = (int(one) for one in torch.aminmax(ids))
    if least < 0 or largest >= table.rows:
        bad = least if least < 0 else largest
        raise ProtocolError(
            f"table {table.name!r}: ids must be those of its rows (expected 0 to {table.rows - 1}, got {bad})",
            ErrorCode.BAD_VALUE,
        )
    if are_sorted and not bool((ids[1:] > ids[:-1]).all()):
        raise ProtocolError(f"table {table.name!r}: ids must be ascending, each once", ErrorCode.BAD_VALUE)
