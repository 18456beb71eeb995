"""Mutated frames: decoded in this process, and sent to a server that an honest worker trains with."""

from __future__ import annotations

import random
import time
from typing import Any

from attacks.hostile_client import answers, look_around, ordeal, resident_bytes
from fuzz.fuzz_frames import SEEDS, check, mutate
from support.server_process import Peer

BURST = 2000  # sent before the answers are read


def mutate_in_process(frames: int, seed: int) -> list[Any]:
    """A row: so many messages of mutated frames through the decoder, which may raise ProtocolError and nothing else."""
    import os

    rng = random.Random(seed)
    before = resident_bytes(os.getpid())
    began_s = time.monotonic()
    accepted = wrong = 0
    for _ in range(frames):
        mutant = mutate(rng, rng.choice(SEEDS)) if rng.random() < 0.97 else [rng.randbytes(rng.randrange(200))]
        try:
            accepted += check(mutant)
        except Exception as error:
            wrong += 1
            print(f"{error!r}: {[frame.hex() for frame in mutant]}", flush=True)
    grew = (resident_bytes(os.getpid()) - before) / 1e6
    return ["through the decoder", frames, accepted, round(time.monotonic() - began_s), round(grew), wrong]


def mutate_over_sockets(frames: int, seed: int) -> list[Any]:
    """A row: so many over TCP to a server. Wrong: unanswered health checks, and updates that nobody pushed."""
    rng = random.Random(seed)
    with ordeal(values=1000) as trial:
        before = resident_bytes(trial.server.pid)
        began_s = time.monotonic()
        answered = sent = 0
        is_well = True
        while sent < frames:
            # A connection ends where the server cuts it.
            with Peer(trial.server.addresses[0], over_tcp=True) as peer:
                for _ in range(min(BURST, frames - sent)):
                    peer.socket.send_multipart(mutate(rng, rng.choice(SEEDS)) or [b""])
                    sent += 1
                answered += answers(peer, 100)
            is_well = trial.push() and is_well
        seconds = time.monotonic() - began_s
        health, _ = look_around(trial.server)
        grew = (resident_bytes(trial.server.pid) - before) / 1e6
        wrong = trial.foreign_updates() + (not is_well) + (health != "10/10")
    return ["over TCP to a server", sent, answered, round(seconds), round(grew), wrong]
