"""What the shards of a server saved of one job, put together: it may be restored by another number of shards. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def merge_job_meta(metas: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One job's meta from those of several shards: everybody's members, each with its newest incarnation."""
    return {
        **metas[0],
        **merge_members(metas),
        "has_started": any(meta["has_started"] for meta in metas),
        "came": sorted({rank for meta in metas for rank in meta["came"]}),
        "expected_workers": max(meta["expected_workers"] for meta in metas),
    }


def merge_members(metas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What several shards saved of one job's members: of each rank its newest incarnation, present rather than gone."""
    entries = [(m["incarnation"], kind, m) for meta in metas for kind in ("absent", "members") for m in meta[kind]]
    newest: dict[int, tuple[str, dict[str, Any]]] = {}
    for _, kind, entry in sorted(entries, key=lambda entry: (entry[0], entry[1])):
        newest[entry["rank"]] = (kind, entry)
    return {kind: [entry for k, entry in newest.values() if k == kind] for kind in ("members", "absent")}
