"""How large buckets may grow: native DDP's rules for ``bucket_cap_mb`` and ``bucket_cap_mb_list``."""

from __future__ import annotations

import math
import numbers
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from psengine.errors import ConfigurationError

MIB_BYTES = 1024 * 1024
DEFAULT_CAP_MIB = 25
# A small first bucket starts the exchange early (torch.distributed._DEFAULT_FIRST_BUCKET_BYTES).
DEFAULT_FIRST_BUCKET_BYTES = MIB_BYTES


@dataclass(frozen=True, kw_only=True)
class BucketCaps:
    """Caps in bytes.

    Attributes:
        cap_bytes: of a bucket.
        first_cap_bytes: of the first bucket of each dtype and device.
        per_bucket_bytes: one by one, where the user listed them; else empty.
    """

    cap_bytes: int
    first_cap_bytes: int
    per_bucket_bytes: tuple[int, ...] = ()

    @classmethod
    def from_arguments(cls, cap_mib: float | None, caps_mib: Sequence[float] | None) -> BucketCaps:
        """Read ``bucket_cap_mb`` and ``bucket_cap_mb_list`` (MiB); the list wins, None means the default.

        Raises:
            ConfigurationError: a cap is not a size.
        """
        if caps_mib is not None and not isinstance(caps_mib, (list, tuple)):
            raise ConfigurationError(f"bucket_cap_mb_list is a list of sizes in MiB (got {caps_mib!r})")
        for cap in [*(caps_mib or ()), *([] if cap_mib is None else [cap_mib])]:
            if not isinstance(cap, numbers.Real) or not 0 <= float(cap) < math.inf:
                raise ConfigurationError(f"bucket caps are sizes in MiB (expected a number >= 0, got {cap!r})")
        if caps_mib:
            cap_bytes = int(max(caps_mib) * MIB_BYTES)
            per_bucket_bytes = tuple(int(cap * MIB_BYTES) for cap in caps_mib)
            return cls(cap_bytes=cap_bytes, first_cap_bytes=cap_bytes, per_bucket_bytes=per_bucket_bytes)
        if cap_mib is None:
            return cls(cap_bytes=DEFAULT_CAP_MIB * MIB_BYTES, first_cap_bytes=DEFAULT_FIRST_BUCKET_BYTES)
        cap_bytes = int(cap_mib * MIB_BYTES)
        return cls(cap_bytes=cap_bytes, first_cap_bytes=cap_bytes)

    def initial_limits_bytes(self, *, may_rebuild: bool) -> list[int]:
        """Limits for the first layout.

        Buckets that will be rebuilt in arrival order start as one: until that order is known, an all-reduce in the
        midst of backward could meet other collectives of the model in a different order on another rank.
        """
        if self.per_bucket_bytes:
            return list(self.per_bucket_bytes)
        return [sys.maxsize] if may_rebuild else self.rebuild_limits_bytes()

    def rebuild_limits_bytes(self) -> list[int]:
        """Limits for the layout in arrival order."""
        return list(self.per_bucket_bytes) or [self.first_cap_bytes, self.cap_bytes]
