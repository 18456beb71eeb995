"""Who reads a job's values while others train: what it gets existed, and never goes back within a server's life."""

from __future__ import annotations

import random
from dataclasses import replace

import torch
from typing_extensions import override

from psengine.errors import ServerRefusedError
from psengine.parameter_server.client import join
from psengine.parameter_server.client.flow import Flow
from psengine.parameter_server.client.options import SessionOptions
from psengine.protocol.messages import ErrorCode
from simulation.violation import require
from simulation.worker import WorkerProcess

LONGEST_REST_S = 0.4
MOST_ROWS = 1 << 12  # all of a part
# A job without values yet, or no more; then the layout is read anew.
NO_VALUES = (ErrorCode.NOT_READY, ErrorCode.UNKNOWN_KEY)


class ReaderProcess(WorkerProcess):
    """See the module's text."""

    def __init__(self, training, number: int, options: SessionOptions) -> None:
        self._rng = random.Random(f"reader {training.scenario.seed}")
        self._seen: dict[tuple[int, int], int] = {}  # (life of a server, chunk) -> the newest version
        reads = replace(options, rule=None, run="", rank=None)
        super().__init__(training, number, training.scenario.ranks, reads, options.nonce + 1, shares=False)

    @override
    def _life(self) -> Flow[None]:
        yield from join.start(self.receiver)
        while True:
            yield self._rng.random() * LONGEST_REST_S
            try:
                yield from self._read()
            except ServerRefusedError as error:
                require(error.code in NO_VALUES, "a reader was refused: {}", error)

    def _read(self) -> Flow[None]:
        layout = yield from join.fetch_layout(self.receiver)
        while layout:  # it may know of servers without chunks alone
            yield self._rng.random() * LONGEST_REST_S
            spec = self._rng.choice(layout)
            landing = torch.zeros(spec.numel, dtype=spec.dtype)
            is_table = spec.table is not None
            scan = {"scan": 0, "most": MOST_ROWS} if is_table else {}
            request = self.session.pull(spec.key, () if is_table else [landing], **scan)
            yield [request]
            answer = request.wait()
            self.check_term(answer)
            place = answer.epoch, spec.key
            former = self._seen.get(place, answer.version)
            where = "a reader got version {} of chunk {} after version {}"
            require(answer.version >= former, where, answer.version, spec.key, former)
            self._seen[place] = answer.version
            self.world.job.read(self, spec.key, answer.payload if is_table else landing, answer)
            self.world.counts["reads"] += 1
