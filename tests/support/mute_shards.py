"""A server whose shards stop answering while a file exists: what a wedged disk or a very long update looks like."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

DEADLINE_S = 0.2


def mute_while(flag: Path) -> None:
    """For ``running_server(sabotage=partial(mute_while, flag))``; the server then waits ``DEADLINE_S`` for a shard."""
    from psengine.parameter_server.server import daemon, shard_group
    from psengine.parameter_server.server.transport.shard_thread import ShardThread

    patience_s = shard_group.ANSWER_DEADLINE_S
    ask, answer = daemon.Server.status, ShardThread.status

    def impatient(server: Any) -> dict[str, Any]:
        shard_group.ANSWER_DEADLINE_S = DEADLINE_S if flag.exists() else patience_s
        return ask(server)

    def mute(thread: Any) -> dict[str, Any]:
        if flag.exists():
            time.sleep(2 * DEADLINE_S)
        return answer(thread)

    daemon.Server.status, ShardThread.status = impatient, mute  # type: ignore[method-assign]
