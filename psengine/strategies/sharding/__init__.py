"""Strategy "sync" with a sharded optimizer (ZeRO stage 1)."""

__all__: list[str] = []
