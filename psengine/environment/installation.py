"""How this copy of psengine was installed, and the pip commands that fit it.

The distribution is called ``psengine-torch``, the package ``psengine``. On the package index ``psengine`` is another
project's distribution; its package has the same name, and would overwrite this one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

DISTRIBUTION = "psengine-torch"
# The other project's; copies of ours from before it was renamed have this name too.
OTHER_DISTRIBUTION = "psengine"
OUR_COMMAND = "psengine.cli.main:main"
_PACKAGE = Path(__file__).parents[1]


def install_command(extra: str, *, upgrade: bool = False, package: Path = _PACKAGE) -> str:
    """Return the command that installs an extra's packages for the copy of psengine in the folder ``package``.

    Args:
        extra: as in pyproject.toml, such as "server".
        upgrade: packages that are there may be too old.
        package: the folder that ``import psengine`` finds.
    """
    # Of an installed distribution pip brings the extra's packages, and leaves the distribution alone.
    source = f"'{DISTRIBUTION}[{extra}]'"
    if _is_checkout(package):
        source = f"-e '{package.parent}[{extra}]'"
    return f"pip install {'--upgrade ' if upgrade else ''}{source}"


def reinstall_command(*, package: Path = _PACKAGE) -> str:
    """Return the command that restores the files of that copy, and nothing else."""
    return f"pip install --force-reinstall --no-deps {_source(package)}"


def build_command(*, package: Path = _PACKAGE) -> str:
    """Return the command that builds the native extension of that copy here.

    setup.py finds torch although pip isolates the build.
    """
    source = _source(package)
    if source == f"'{DISTRIBUTION}'" or source.endswith(".whl'"):  # a wheel is built already
        source = f"--no-binary {DISTRIBUTION} {DISTRIBUTION}"
    return f"pip install --force-reinstall --no-deps {source}"


def origin(*, package: Path = _PACKAGE) -> str:
    """Describe where that copy lies, and where it was installed from."""
    if _is_checkout(package):
        return f"imported from the checkout {package.parent}"
    url = _direct_url(package)
    return f"installed in {package.parent}" + (f" from {url}" if url else "")


def other_distributions(*, package: Path = _PACKAGE) -> Iterator[tuple[str, bool]]:
    """Yield version and folder of each installed distribution ``psengine``, and whether it is ours."""
    from importlib import metadata  # not at the top: every command imports this module, and few ask

    # Keyed by folder, because sys.path may name one twice.
    distributions = {
        Path(str(found.locate_file(""))).resolve(): found for found in metadata.distributions(name=OTHER_DISTRIBUTION)
    }
    for folder, found in distributions.items():
        # A build leaves psengine.egg-info beside its sources; that is no installation.
        if folder != package.parent.resolve() or not _is_checkout(package):
            yield f"psengine {found.version} in {folder}", any(e.value == OUR_COMMAND for e in found.entry_points)


def _source(package: Path) -> str:
    """The requirement for pip, with its options."""
    if _is_checkout(package):
        return f"-e '{package.parent}'"
    url = _direct_url(package)
    local = Path(unquote(urlsplit(url).path)) if url.startswith("file:") else None
    if not url or (local is not None and not local.exists()):
        return f"'{DISTRIBUTION}'"
    return f"'{DISTRIBUTION} @ {url}'" if local is None else f"'{local}'"


def _is_checkout(package: Path) -> bool:
    """Whether the sources lie beside the package: installed as editable, or found on PYTHONPATH."""
    return (package.parent / "csrc").is_dir() and (package.parent / "pyproject.toml").is_file()


def _direct_url(package: Path) -> str:
    """The URL that pip installed that copy from (PEP 610: direct_url.json beside its metadata); "" for an index."""
    from importlib import metadata

    for found in metadata.distributions(name=DISTRIBUTION, path=[str(package.parent)]):
        direct = json.loads(found.read_text("direct_url.json") or "{}")
        revision = direct.get("vcs_info")
        return f"{revision['vcs']}+{direct['url']}@{revision['commit_id']}" if revision else str(direct.get("url", ""))
    return ""
