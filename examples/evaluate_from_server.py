"""Print the test accuracy of a training that goes on elsewhere, from the weights that parameter servers hold.

psengine-server                                                                                servers
PSENGINE_SERVERS=tcp://127.0.0.1:7077 python examples/train_images.py --strategy async         workers
python examples/evaluate_from_server.py --server-address tcp://127.0.0.1:7077 --every 5        reads, disturbs nobody

Only servers that apply gradients ("async") hold weights; those of "sync-server" hold averages, and the weights are
with the workers.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch
from image_data import Data, load_data
from image_network import ImageClassifier
from image_options import OptionParser, positive_float, positive_int
from rank_errors import UserError
from torch import nn
from train_images import count_correct, describe_accuracy

import psengine

POLL_S = 0.2
CPU = torch.device("cpu")


def main() -> int:
    try:
        options = parse_options()
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        data = load_data(options.data)
        with psengine.connect(
            options.server_address,
            job=options.job,
            role="reader",
            timeout_s=options.timeout,
            connect_timeout_s=options.timeout,
        ) as client:
            follow(client, data, options)
    except (UserError, psengine.ConfigurationError, psengine.ServerError) as error:
        sys.stderr.write(f"{Path(__file__).name}: error: {error}\n")
        return 2 if isinstance(error, UserError | psengine.ConfigurationError) else 1
    except KeyboardInterrupt:
        return 130
    return 0


def follow(client: psengine.Client, data: Data, options: argparse.Namespace) -> None:
    """Evaluate every ``options.every`` seconds until all workers have left, or ``options.times`` times."""
    network = ImageClassifier(data.classes)
    wait_for_weights(client, options)
    evaluated = None
    for _ in range(options.times or sys.maxsize):
        due_s = time.monotonic() + options.every
        is_over = has_ended(client, options.job)  # asked before: nothing changes any more once it is true
        version = pull_weights(client, network)
        if version != evaluated:
            correct = count_correct(network, *data.test.tensors, CPU)
            print(f"version {version}  {describe_accuracy(correct, len(data.test))}", flush=True)
            evaluated = version
        if is_over:
            print("all workers have left")
            return
        time.sleep(max(0.0, due_s - time.monotonic()))


def pull_weights(client: psengine.Client, network: nn.Module) -> int:
    """Overwrite ``network``'s parameters and buffers by the servers'; return how many updates those have seen.

    Parts arrive one by one while training goes on, so some may be an update ahead of others: the least counts.
    """
    client.pull(into=network.state_dict())
    return min(client.session.version(chunk.key) for chunk in client.layout())


def wait_for_weights(client: psengine.Client, options: argparse.Namespace) -> None:
    deadline_s = time.monotonic() + options.timeout
    while (job := job_status(client, options.job)) is None or not job["sealed"]:
        if time.monotonic() > deadline_s:
            raise UserError(
                f"--job {options.job}: nobody trains it (expected a worker within --timeout {options.timeout:g} s)"
            )
        time.sleep(POLL_S)
    if job["rule"]["name"] != "apply":
        raise UserError(
            f"--job {options.job}: its servers hold no weights (expected a job of strategy async, got one that averages"
            " gradients)"
        )


def has_ended(client: psengine.Client, job: str) -> bool:
    status = job_status(client, job)
    return status is not None and status["members"] == 0


def job_status(client: psengine.Client, job: str) -> dict | None:
    """What the lead says of the job; None while it knows nothing of it."""
    return client.status()[0]["jobs"].get(job)


def parse_options() -> argparse.Namespace:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = OptionParser(description=__doc__, formatter_class=formatter, allow_abbrev=False)
    add = parser.add_argument
    add("--server-address", metavar="ADDRESSES", help="the lead first, with commas (default: PSENGINE_SERVERS)")
    add("--job", default=os.environ.get("PSENGINE_JOB") or "default", metavar="NAME", help="(default: PSENGINE_JOB)")
    add("--data", type=Path, metavar="DIR", help="what the workers train on (default: scikit-learn's digits)")
    add("--every", type=positive_float, default=5.0, metavar="S", help="seconds between evaluations (default: 5)")
    add("--times", type=positive_int, metavar="N", help="end after so many (default: when all workers have left)")
    add("--timeout", type=positive_float, default=60.0, metavar="S", help="wait for servers and workers (default: 60)")
    add("--threads", type=positive_int, metavar="N", help="threads to evaluate with (default: torch's)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
