"""``python -m psengine.verify.worker``: a rank that trains targets side by side."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from psengine.specification import Specification
from psengine.verify.differences import Tolerance
from psengine.verify.place import Place
from psengine.verify.rank import serve
from psengine.verify.settings import Settings, is_over_servers
from psengine.verify.side_by_side import RefusedError, train_side_by_side
from psengine.verify.target import Target, check_target, load_function
from psengine.verify.training import Exchange
from psengine.verify.zoo import ZOO


def run(place: Place, work: dict[str, Any]) -> dict[str, Any]:
    """Compare ``work["target"]``, or else each model of ``work["zoo"]``; the result is by name."""
    if work["target"] is not None:
        name = work["target"]
        place.note(f"the import of {name}")
        return {name: compare_target(load_function(name), name, place, work)}
    found = {}
    for name in work["zoo"]:
        try:
            found[name] = compare_target(ZOO[name].build, name, place, work)
        except RefusedError as error:
            found[name] = {"refused": str(error)}
    return found


def compare_target(function: Callable[[], Any], name: str, place: Place, work: dict[str, Any]) -> dict[str, Any]:
    """Train candidate and reference."""

    def make() -> Target:
        return check_target(function(), name)

    settings = Settings(**work["settings"])
    candidate, reference = (_exchange(name, work) for name in (settings.strategy, settings.against))
    findings = train_side_by_side(
        make,
        name,
        candidate,
        reference,
        place,
        steps=settings.steps,
        seed=settings.seed,
        tolerance=Tolerance(relative=settings.rtol, absolute=settings.atol),
    )
    return {"findings": findings}


# The same on every rank, because ranks make the same trainings in the same order.
_numbers = itertools.count()


def _exchange(name: str, work: dict[str, Any]) -> Exchange:
    """``name`` with, for a strategy over servers, the server of this comparison and a job of its own there."""
    if not is_over_servers(name):
        return Exchange(name, name)
    own = {"job": f"{work['job']}.{next(_numbers)}"}
    if work["server"] is not None:
        own["servers"] = work["server"]
    return Exchange(name, Specification.parse("strategy", name).with_options(**own))


if __name__ == "__main__":
    serve(run)
