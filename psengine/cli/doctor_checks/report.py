"""The checks in their order, each with a deadline."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterable, Mapping

from psengine.cli.doctor_checks.findings import Check, CheckContext, Finding, Level, problem, warning

# In the order of the report: each is a function of a module of this folder.
CHECKS = {
    "versions": "software.versions",
    "installation": "software.installed",
    "native-extension": "software.native_extension",
    "cuda": "software.cuda",
    "threads": "machine.threads",
    "dev-shm": "machine.dev_shm",
    "hostname": "machine.hostname",
    "launcher": "variables.launcher",
    "variables": "variables.variables",
    "exchange": "exchange.exchange",
    "servers": "servers.servers",
}
CHECK_DEADLINE_S = 20.0
# Two interpreters start.
EXCHANGE_DEADLINE_S = 45.0


def load_checks() -> dict[str, Check]:
    """The checks by name. Imports torch, which may take longer than a check."""
    places = {name: place.split(".") for name, place in CHECKS.items()}
    modules = {module: importlib.import_module(f"psengine.cli.doctor_checks.{module}") for module, _ in places.values()}
    return {name: getattr(modules[module], function) for name, (module, function) in places.items()}


def examine(name: str, check: Check, context: CheckContext) -> list[Finding]:
    """What a check finds; a check that fails, or does not end in time, is a finding too."""
    findings: list[Finding] = []

    def work() -> None:
        try:
            for finding in check(context):
                findings.append(finding)
        except Exception as error:
            text = f"this check itself failed: {type(error).__name__}: {error}"
            findings.append(warning(text, "report it, with the output of psengine doctor --json"))

    # A daemon thread: a check that hangs must not keep the command from ending.
    thread = threading.Thread(target=work, name=f"psengine-doctor-{name}", daemon=True)
    thread.start()
    limit_s = CHECK_DEADLINE_S
    if name == "exchange":
        limit_s = EXCHANGE_DEADLINE_S
    elif name == "servers":
        limit_s += len(context.servers) * (CHECK_DEADLINE_S + 4 * context.timeout_s)
    thread.join(limit_s)
    if not thread.is_alive():
        return findings
    fix = "something that it asks does not answer: name servers, the network, or a very busy machine"
    return [*findings, problem(f"this check had not ended after {limit_s:g} s", fix)]


def count_levels(findings: Iterable[Finding]) -> dict[str, int]:
    """How many findings there are of each level."""
    levels = [finding.level for finding in findings]
    return {level.value: levels.count(level) for level in Level}


def summary(counts: Mapping[str, int]) -> str:
    """The last line of a report."""
    listed = [f"{counts[level]} {level}{'s' if counts[level] != 1 else ''}" for level in ("problem", "warning", "note")]
    return f"{', '.join(listed)}."
