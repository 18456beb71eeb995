"""A parameter server as a Ray actor, and all servers of a group of workers.

The server is a thread of the actor's process, so that it ends whenever the actor does. Ray starts a dead actor again
with the same arguments; the actor then takes its former port and its newest snapshot.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray._private.worker import _global_node
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from psengine.errors import ServerError
from psengine.parameter_server.server.daemon import Server
from psengine.parameter_server.server.settings import ServerSettings
from psengine.tracing.logging_format import TextFormatter

logger = logging.getLogger(__name__)

START_S = 60.0
END_S = 60.0
# As `psengine run`: how much a crash of a server may lose.
SNAPSHOT_INTERVAL_S = 15.0
_READY = "psengine-server ready "


class ServerActor:
    """One server; Ray makes it on the node of its bundle.

    Args:
        index: of this server.
        run: of this group of workers; part of the name of a folder in the node's folder of Ray's session.
        secret: the word that clients have too.
        options: more settings of ``ServerSettings``.
        snapshot_dir: the folder of all servers' snapshots; None keeps them in the folder of the run.
        keeps_weights: whether there is anything to snapshot.
    """

    def __init__(
        self,
        index: int,
        run: str,
        secret: str,
        options: Mapping[str, Any],
        snapshot_dir: str | None,
        keeps_weights: bool,
    ) -> None:
        _log_to_stderr()
        self._folder = Path(_global_node.get_session_dir_path()) / f"psengine-{run}-{index}"
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._port = self._folder / "port"
        snapshots = Path(snapshot_dir or self._folder) / f"server-{index}"
        settings: dict[str, Any] = {"snapshot_interval_s": SNAPSHOT_INTERVAL_S, **options}
        if keeps_weights:
            snapshots.mkdir(parents=True, exist_ok=True)
            settings["snapshot_dir"] = snapshots
        self._address = ""
        self._exit_code: int | None = None
        self._is_ending = False
        self._is_decided = threading.Event()
        self._server = Server(ServerSettings(bind=self._bind(), secret_file=Path(file_in_memory(secret)), **settings))
        self._thread = threading.Thread(target=self._serve, name="psengine-server", daemon=True)
        self._thread.start()
        self._is_decided.wait(START_S)
        if not self._address:
            raise ServerError(
                f"parameter server {index} did not start on {ray.util.get_node_ip_address()} (expected it ready within"
                f" {START_S:g} s, got {'no answer' if self._exit_code is None else f'exit code {self._exit_code}'});"
                " its log says why"
            )
        self._port.write_text(self._address.rpartition(":")[2])

    def address(self) -> str:
        """Where clients connect."""
        return self._address

    def end(self) -> int | None:
        """End in order, with a last snapshot; remove what only this group of workers needed. Returns the exit code."""
        self._is_ending = True
        self._server.end("the group of workers ends")
        self._thread.join(END_S)
        shutil.rmtree(self._folder, ignore_errors=True)
        return self._exit_code

    def _bind(self) -> str:
        host = ray.util.get_node_ip_address()
        port = self._port.read_text() if self._port.exists() else "0"
        return f"tcp://{f'[{host}]' if ':' in host else host}:{port}"

    def _serve(self) -> None:
        self._exit_code = self._server.run(self._announce)
        was_ready = bool(self._address)
        self._is_decided.set()
        if was_ready and not self._is_ending:
            # Of its own accord: Ray starts the actor again.
            logger.critical("the server ended with exit code %d", self._exit_code)
            os._exit(self._exit_code or 1)

    def _announce(self, line: str) -> None:
        logger.info("%s", line)
        if line.startswith(_READY):
            self._address = line.removeprefix(_READY).split()[0]
            self._is_decided.set()


class Servers:
    """The servers of one group of workers, beside them in their placement group.

    Args:
        count: of servers, spread evenly over the bundles. They take no resources of their own.
        group: the workers' placement group; what is left in it ends with it.
        arguments: of ``ServerActor``, from ``secret`` on.
    """

    def __init__(self, count: int, group: PlacementGroup, *arguments: Any) -> None:
        run = secrets.token_hex(4)
        bundles = len(group.bundle_specs)
        actor = ray.remote(ServerActor)
        self._actors = [
            actor.options(
                name=f"psengine-server-{run}-{index}",
                num_cpus=0,
                max_restarts=-1,
                max_task_retries=-1,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=group, placement_group_bundle_index=index * bundles // count % bundles
                ),
            ).remote(index, run, *arguments)
            for index in range(count)
        ]

    def addresses(self) -> list[str]:
        """Where the servers listen now, after those that died are back.

        Raises:
            ServerError: one does not start, or not in time.
        """
        try:
            return list(ray.get([actor.address.remote() for actor in self._actors], timeout=2 * START_S))
        except ray.exceptions.RayActorError as error:
            raise ServerError(f"a parameter server did not start: {error}") from error
        except ray.exceptions.GetTimeoutError as error:
            raise ServerError(f"the parameter servers were not ready after {2 * START_S:g} s") from error

    def end(self) -> None:
        """End all, in order where they answer."""
        actors, self._actors = self._actors, []
        ray.wait([actor.end.remote() for actor in actors], num_returns=len(actors), timeout=END_S)
        for actor in actors:
            ray.kill(actor)


def file_in_memory(text: str) -> str:
    """Return the path of a file of mode 0600 with ``text``, which ends with this process and lies on no disk."""
    descriptor = os.memfd_create("psengine-secret")
    os.fchmod(descriptor, 0o600)
    os.write(descriptor, text.encode())
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def _log_to_stderr() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(TextFormatter())
    ours = logging.getLogger("psengine")
    ours.addHandler(handler)
    ours.setLevel(logging.INFO)
    ours.propagate = False
