"""Print the test accuracy of a training that goes on elsewhere, from the weights that parameter servers hold.

psengine-server                                                                                servers
PSENGINE_SERVERS=tcp://127.0.0.1:7077 python examples/train_images.py --strategy async         workers
python examples/evaluate_from_server.py --server-address tcp://127.0.0.1:7077 --every 5        reads, disturbs nobody

Only servers that apply gradients ("async") hold weights; those of "sync-server" hold averages, and the weights are
with the workers. The network and the images are those of train_images.py.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

import torch
from sklearn.datasets import load_digits
from torch import nn

import psengine

POLL_S = 0.2


def make_network() -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs, stride in ((1, 16, 1), (16, 32, 2), (32, 64, 2)):
        convolution = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        layers += [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--server-address", metavar="ADDRESSES", help="the lead first, with commas (default: PSENGINE_SERVERS)")
    add("--job", default=os.environ.get("PSENGINE_JOB") or "default", metavar="NAME", help="(default: PSENGINE_JOB)")
    add("--every", type=float, default=5.0, metavar="S", help="seconds between evaluations (default: 5)")
    add("--timeout", type=float, default=60.0, metavar="S", help="wait for servers and workers (default: 60)")
    options = parser.parse_args()
    try:
        with psengine.connect(
            options.server_address,
            job=options.job,
            role="reader",
            timeout_s=options.timeout,
            connect_timeout_s=options.timeout,
        ) as client:
            follow(client, options)
    except psengine.PSEngineError as error:
        sys.exit(f"evaluate_from_server.py: {error}")


def follow(client: psengine.Client, options: argparse.Namespace) -> None:
    """Evaluate every ``options.every`` seconds until all workers have left."""
    digits = load_digits()
    images, labels = torch.from_numpy(digits.images).float().unsqueeze(1) / 16, torch.from_numpy(digits.target)
    is_test = torch.arange(len(labels)) % 5 == 4
    network = make_network().eval()
    wait_for_weights(client, options)
    is_over = False
    while not is_over:
        is_over = job_status(client, options)["members"] == 0  # asked before: nothing changes once it is true
        client.pull(into=network.state_dict())  # parameters and buffers; parts arrive while the training goes on
        version = min(client.session.version(chunk.key) for chunk in client.layout() if chunk.kind.is_trained)
        with torch.no_grad():
            accuracy = (network(images[is_test]).argmax(1) == labels[is_test]).float().mean().item()
        print(f"version {version}  accuracy {accuracy:.2%}", flush=True)
        time.sleep(0 if is_over else options.every)
    print("all workers have left")


def wait_for_weights(client: psengine.Client, options: argparse.Namespace) -> None:
    deadline_s = time.monotonic() + options.timeout
    # Members, or what they have left behind.
    while not (job := job_status(client, options)).get("members") and not job.get("applied"):
        if time.monotonic() > deadline_s:
            sys.exit(f"--job {options.job}: no worker trains it (expected one within {options.timeout:g} s)")
        time.sleep(POLL_S)
    if job["rule"]["name"] != "apply":
        sys.exit(f"--job {options.job}: its servers hold no weights (expected strategy async, got averages)")


def job_status(client: psengine.Client, options: argparse.Namespace) -> dict:
    """What the lead says of the job; empty while it knows nothing of it."""
    return client.status()[0]["jobs"].get(options.job, {})


if __name__ == "__main__":
    main()
