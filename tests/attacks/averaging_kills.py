"""Servers and workers killed at random moments under "sync-server", and an account of every average.

Worker r pushes gradients in element r of every chunk, as in ``kill_loop``: an average says whose it is made of.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from contextlib import ExitStack

import torch
from attacks.kill_loop import CHUNKS, PATIENCE_S, SERVERS, WORKERS, Counters, Servers, enter, until
from support.fault_workers import Reports, results_of, worker_processes

from psengine.parameter_server.client.link import Link
from psengine.parameter_server.client.worker_session import wait_all
from psengine.protocol.messages import Message, MessageType

AVERAGE = {"name": "average", "quorum": None}


def average_for_a_while(
    reports: Reports, addresses: Sequence[str], steps: int, deaf_to: str = ""
) -> list[list[tuple[float, ...]]]:
    """``steps`` averages of every chunk; the last ones of ``deaf_to`` arrive when that server has another epoch."""
    session, rank = enter(addresses, AVERAGE)
    epochs, receive, step = {link.index: link.epoch for link in session.job_connection.links}, Link.receive, 0

    def hear(link: Link, message: Message, now_s: float) -> None:
        is_deaf = link.address.startswith(deaf_to or "-") and step == steps and message.epoch == epochs[link.index]
        if not (is_deaf and message.type is MessageType.UPDATED):
            receive(link, message, now_s)

    Link.receive = hear  # type: ignore[method-assign]
    landings = [torch.zeros(WORKERS) for _ in range(CHUNKS)]
    averages = []
    for step in range(1, steps + 1):
        gradient = torch.zeros(WORKERS)
        gradient[rank] = float(step)
        wait_all([session.push(key, gradient.clone(), [landing]) for key, landing in enumerate(landings)])
        averages.append([tuple(landing.tolist()) for landing in landings])
        reports.say("step", step)
    session.close()
    return averages


def run_sync(
    tries: int, seed: int, *, steps: int = 60, worker_share: float = 0.3, most_s: float = float("inf")
) -> Counters:
    """``tries`` trainings under "sync-server", in each of which a server or a worker is killed."""
    chooser = random.Random(seed)
    counters = Counters()
    for _ in until(most_s, range(tries)):
        counters += _one_sync_try(chooser, steps, chooser.random() < worker_share)
    return counters


def _one_sync_try(chooser: random.Random, steps: int, kills_worker: bool) -> Counters:
    counters = Counters(tries=1)
    with ExitStack() as context:
        servers, killed = Servers(context, lambda _: {}), chooser.randrange(SERVERS)
        members = context.enter_context(worker_processes())
        # Every other time at the end, where workers leave, and one of them lacks what the others have.
        at_least = steps if chooser.random() < 0.5 else chooser.randrange(1, steps)
        deaf = chooser.randrange(WORKERS) if at_least == steps and not kills_worker else -1
        deaf_to = {deaf: servers.addresses[killed]}
        arguments = average_for_a_while, servers.addresses, steps
        workers = [members.start(*arguments, deaf_to.get(rank, ""), rank=rank) for rank in range(WORKERS)]
        workers[chooser.choice([rank for rank in range(WORKERS) if rank != deaf])].wait_for("step", at_least=at_least)
        if deaf >= 0:
            time.sleep(0.2)  # the others leave if they can
        time.sleep(chooser.uniform(0.0, 0.005))
        victim = chooser.randrange(WORKERS) if kills_worker else -1
        if kills_worker:
            workers.pop(victim).kill()
        else:
            servers.kill(killed)
        results = results_of(workers, PATIENCE_S + 10)
    counters.survived = 1
    for step in range(steps):
        # The same workers count in every chunk of a step.
        sets = {tuple(share > 0 for share in average) for result in results for average in result[step]}
        counters.two_results += len(sets) > 1
        for key in range(CHUNKS):
            found = {result[step][key] for result in results}
            counters.two_results += len(found) > 1
            shares = {share for average in found for share in average if share}
            counters.doubled += len(shares) > 1 and len(found) == 1
            missing = sum(not share for share in next(iter(found)))
            counters.lost += missing if not kills_worker else max(0, missing - 1)
    return counters
