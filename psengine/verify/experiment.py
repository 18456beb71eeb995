"""``compare``: train a target two ways from the same seed, in real processes, and find the first difference."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

from psengine.errors import ConfigurationError
from psengine.verify import target as targets
from psengine.verify.launch import RankFailedError, run_ranks
from psengine.verify.servers import comparison_server
from psengine.verify.settings import Settings
from psengine.verify.verdict import Comparison, is_different, merge
from psengine.verify.zoo import ZOO

WORKER = "psengine.verify.worker"


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
    targets.check_name(target)
    return _compare_all(target, (), settings or Settings(), on_note)[0]


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
    return _compare_all(None, names, settings or Settings(steps=6), on_note)


def _compare_all(
    target: str | None, zoo: Sequence[str], settings: Settings, on_note: Callable[[str], None]
) -> list[Comparison]:
    deadline_s = time.monotonic() + settings.timeout_s
    with _server(settings) as address:
        work = {"target": target, "zoo": list(zoo), "server": address}
        reports = _train(settings, work, on_note)
        different = [name for name in reports if is_different(reports[name])]
        controls, why_no_control = {}, ""
        if different and settings.strategy == settings.against:
            controls = {name: reports[name] for name in different}
        elif different:
            # In processes that have not trained yet: what the target keeps at module level is as it was for the first
            # two trainings.
            left_s = max(0.1, deadline_s - time.monotonic())
            control = replace(settings, strategy=settings.against, timeout_s=left_s)
            try:
                controls = _train(control, {**work, "zoo": different}, lambda text: on_note(f"control: {text}"))
            except RankFailedError as error:
                why_no_control = str(error)
    return [
        merge(
            reports[name],
            target=name,
            strategy=settings.strategy,
            against=settings.against,
            steps=settings.steps,
            seed=settings.seed,
            controls=controls.get(name, ()),
            why_no_control=why_no_control if name in different else "",
        )
        for name in reports
    ]


def _train(settings: Settings, work: dict[str, Any], on_note: Callable[[str], None]) -> dict[str, list[dict[str, Any]]]:
    """The ranks' reports, in rank order, by name of the target."""
    reports = run_ranks(
        WORKER,
        {**work, "settings": asdict(settings), "job": f"verify-{uuid.uuid4().hex}"},
        world_size=settings.world_size,
        timeout_s=settings.timeout_s,
        device=settings.device,
        on_note=on_note,
    )
    return {name: [report[name] for report in reports] for name in reports[0]}


@contextmanager
def _server(settings: Settings) -> Iterator[str | None]:
    """The address of a server, where one is needed; not that of a job that is at work."""
    if not settings.needs_server:
        yield None
        return
    with comparison_server() as address:
        yield address
