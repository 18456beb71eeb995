"""Where ``init`` places this process: by its arguments, which are torch's, else by the launcher's variables."""

from __future__ import annotations

from dataclasses import replace
from urllib.parse import urlsplit

from psengine.environment.launchers import Master, Placement
from psengine.environment.variables import launched_as, master_of, read_variable
from psengine.errors import ArgumentTypeError, ConfigurationError, EnvironmentVariableError

ARGUMENTS = "arguments of init()"
INIT_METHOD = "init_method"


def place(rank: int | None, world_size: int | None, init_method: str | None) -> Placement:
    """Return the placement that the arguments describe; what they leave out is the launcher's.

    Raises:
        ConfigurationError, ArgumentTypeError: the arguments contradict each other, or are no ranks and no init method.
        EnvironmentVariableError: the launcher's variables are needed, and incomplete or contradictory.
    """
    _check_world(rank, world_size)
    if init_method is None and rank is None:
        return launched_as()
    placement = launched_as(needs_master=False) if rank is None else _given(rank, world_size)
    if placement.launcher == "none" and init_method not in (None, "env://"):
        raise ConfigurationError(
            "init_method says where ranks meet, and nothing says how many there are (expected rank= and world_size="
            f" beside it, or a launcher's variables, got only init_method={init_method!r}). Fix: give them, or leave it"
            " out to train alone."
        )
    if placement.world_size == 1:
        return placement
    scheme, path, master = _read("env://" if init_method is None else init_method)
    agent = (read_variable("MASTER_ADDR"), read_variable("MASTER_PORT"))
    if scheme == "tcp" and read_variable("TORCHELASTIC_USE_AGENT_STORE") == "True":
        assert master is not None
        if (master.address, str(master.port)) != agent:
            raise ConfigurationError(
                f"torchrun's agent keeps the store of its ranks, and no rank listens at another address (expected no"
                f" init_method, or tcp://{agent[0]}:{agent[1]}; got {init_method}). Fix: leave it out."
            )
    if scheme == "env":
        return replace(placement, master=master_of(placement.world_size))
    return replace(placement, master=master, meeting_file=path)


def _given(rank: int, world_size: int | None) -> Placement:
    """The arguments' place in the world; the place on the host is the launcher's, where it describes the same world."""
    assert world_size is not None
    try:
        launched = launched_as(needs_master=False)
    except EnvironmentVariableError:
        launched = None
    if launched is not None and (launched.rank, launched.world_size) == (rank, world_size):
        return replace(launched, launcher=ARGUMENTS, note="")
    is_alone = world_size == 1
    return Placement(
        launcher=ARGUMENTS, rank=rank, local_rank=0 if is_alone else None, world_size=world_size,
        local_world_size=1 if is_alone else None, master=None,
    )  # fmt: skip


def _check_world(rank: object, world_size: object) -> None:
    if rank is None and world_size is None:
        return
    if rank is None or world_size is None:
        raise ConfigurationError(
            f"init(rank=, world_size=) go together (expected both or neither, got rank={rank},"
            f" world_size={world_size}). Fix: give both, or neither, to take the launcher's."
        )
    for name, value in (("rank", rank), ("world_size", world_size)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise ArgumentTypeError(f"init({name}=) is a whole number (expected an int, got {value!r})")
    assert isinstance(rank, int)
    assert isinstance(world_size, int)
    if not 0 <= rank < world_size:
        raise ConfigurationError(
            f"init(rank=, world_size=): ranks count from 0 (expected 0 <= rank < world_size, got rank {rank} of"
            f" {world_size})"
        )


def _read(init_method: object) -> tuple[str, str, Master | None]:
    """The scheme of an init method, the path of a file, and the master of tcp."""
    parts = urlsplit(init_method) if isinstance(init_method, str) else None
    if parts is not None and not parts.query and not parts.fragment:
        try:
            port = parts.port
        except ValueError:
            port = None
        if parts.scheme == "env" and not parts.netloc and not parts.path:
            return "env", "", None
        if parts.scheme == "file" and not parts.netloc and parts.path.startswith("/"):
            return "file", parts.path, None
        if parts.scheme == "tcp" and parts.hostname and port and parts.path in ("", "/"):
            master = Master(
                address=parts.hostname, port=port, address_source=INIT_METHOD, port_source=INIT_METHOD
            )  # fmt: skip
            return "tcp", "", master
    raise ConfigurationError(
        "init_method says where the ranks meet (expected tcp://HOST:PORT, file:///ABSOLUTE/PATH or env://, got"
        f" {init_method!r}). Rank and world size are arguments of their own."
    )
