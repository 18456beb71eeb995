"""Train a target two ways from the same seed, in real processes, and find the first difference."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

from psengine.environment.variables import read_variable
from psengine.errors import ConfigurationError
from psengine.specification import Specification
from psengine.verify.differences import Tolerance
from psengine.verify.ranks import Place, RankFailedError, run_ranks
from psengine.verify.settings import Settings, is_over_servers
from psengine.verify.side_by_side import Findings, train_side_by_side
from psengine.verify.target import RefusedError, check_name, check_target, load_function
from psengine.verify.training import Exchange
from psengine.verify.verdict import Comparison, is_different, merge
from psengine.verify.zoo import ZOO


def compare(
    target: str, settings: Settings | None = None, *, on_note: Callable[[str], None] = lambda text: None
) -> Comparison:
    """Train ``target`` under ``settings.strategy`` and ``settings.against`` side by side; report what differs.

    Args:
        target: "module:function" or "path/to/file.py:function". The function takes no arguments and returns ``(model,
            batch_fn, loss_fn, optimizer_fn)``, and as a fifth part keyword arguments for both wrappers if any; see
            ``Target``. It is called once for each training, on each rank.
        settings: default: 10 steps of "sync" against native DDP on two ranks.
        on_note: told now and then what rank 0 is doing.

    Raises:
        ConfigurationError: the target cannot be found or is none, or a strategy refuses it.
        RankFailedError: the target's code raised (its traceback is in ``rank_traceback``), a rank died, or the
            deadline passed.
    """
    check_name(target)
    return _compare_all((target,), settings or Settings(), on_note)[0]


def compare_zoo(
    names: Sequence[str] = tuple(ZOO),
    settings: Settings | None = None,
    *,
    on_note: Callable[[str], None] = lambda text: None,
) -> list[Comparison]:
    """``compare`` for built-in models, one after the other on the same ranks; one that a strategy does not take is
    "refused".

    Args:
        names: of ``ZOO``.
        settings: default: 6 steps of "sync" against native DDP on two ranks.
        on_note: see ``compare``, and its errors.
    """
    unknown = [name for name in names if name not in ZOO]
    if unknown or not names:
        raise ConfigurationError(f"the zoo has no such model (expected some of {', '.join(ZOO)}; got {unknown})")
    return _compare_all(names, settings or Settings(steps=6), on_note)


def _compare_all(names: Sequence[str], settings: Settings, on_note: Callable[[str], None]) -> list[Comparison]:
    deadline_s = time.monotonic() + settings.timeout_s
    with comparison_server() if settings.needs_server else nullcontext() as address:
        reports = _train(names, settings, address, on_note)
        different = [name for name in names if is_different(reports[name])]
        controls: dict[str, Sequence[Findings | str]] = {}
        why_no_control = ""
        if different and settings.strategy == settings.against:
            controls = {name: reports[name] for name in different}
        elif different:
            # In fresh processes, so that the target's state at module level is as it was for the first two trainings.
            left_s = max(0.1, deadline_s - time.monotonic())
            control = replace(settings, strategy=settings.against, timeout_s=left_s)
            try:
                controls = _train(different, control, address, lambda text: on_note(f"control: {text}"))
            except RankFailedError as error:
                why_no_control = str(error)
    return [
        merge(
            reports[name],
            name,
            settings,
            controls=controls.get(name, ()),
            why_no_control=why_no_control if name in different else "",
        )
        for name in names
    ]


def _train(
    names: Sequence[str], settings: Settings, server: str | None, on_note: Callable[[str], None]
) -> dict[str, Sequence[Findings | str]]:
    """The ranks' reports, in rank order, by name of the target."""
    reports = run_ranks(
        train_targets,
        names,
        settings,
        server,
        f"verify-{uuid.uuid4().hex}",
        world_size=settings.world_size,
        timeout_s=settings.timeout_s,
        device=settings.device,
        on_note=on_note,
    )
    return {name: [report[name] for report in reports] for name in names}


def train_targets(
    place: Place, names: Sequence[str], settings: Settings, server: str | None, job: str
) -> dict[str, Findings | str]:
    """On a rank: return the findings for each target or zoo model, or why a strategy refuses a zoo model.

    Strategies over servers use ``server``, or the servers that they name if it is None; each has a job of its own.
    """
    found: dict[str, Findings | str] = {}
    # Ranks make the same trainings in the same order, so that these numbers agree.
    numbers = itertools.count()

    def exchange_of(strategy: str) -> Exchange:
        if not is_over_servers(strategy):
            return Exchange(strategy, strategy)
        own = {"job": f"{job}.{next(numbers)}"}
        if server is not None:
            own["servers"] = server
        return Exchange(strategy, Specification.parse("strategy", strategy).with_options(**own))

    for name in names:
        if name in ZOO:
            function = ZOO[name].build
        else:
            place.note(f"the import of {name}")
            function = load_function(name)
        try:
            found[name] = train_side_by_side(
                lambda function=function, name=name: check_target(function(), name),  # type: ignore[misc]
                name,
                exchange_of(settings.strategy),
                exchange_of(settings.against),
                place,
                steps=settings.steps,
                seed=settings.seed,
                tolerance=Tolerance(relative=settings.rtol, absolute=settings.atol),
            )
        except RefusedError as error:
            if name not in ZOO:
                raise
            found[name] = str(error)
    return found


@contextmanager
def comparison_server() -> Iterator[str]:
    """Start a server for this comparison alone and yield its address.

    Raises:
        ConfigurationError: this environment names keys, which the server would not have.
        ServerError: it did not start.
    """
    from psengine.parameter_server.client.embedded import EmbeddedServer

    if read_variable("PSENGINE_SERVER_KEY"):
        raise ConfigurationError(
            "the server started here has no keys (expected no PSENGINE_SERVER_KEY). Fix: unset PSENGINE_SERVER_KEY and"
            " PSENGINE_CLIENT_KEY, or name your servers: psengine verify --strategy 'async:servers=tcp://...'"
        )
    with EmbeddedServer.start() as server:
        yield server.addresses[0]
