"""The pip commands that fit how this copy of psengine was installed.

The distribution is called ``psengine-torch``, the package ``psengine``. On the package index ``psengine`` is another
project's distribution; its package has the same name, and would overwrite this one.
"""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import unquote, urlsplit

from psengine.errors import MissingExtraError

DISTRIBUTION = "psengine-torch"
OTHER_DISTRIBUTION = "psengine"
_PACKAGE = Path(__file__).parents[1]


def install_command(extra: str, *, package: Path = _PACKAGE) -> str:
    """Return the command that installs an extra's packages for the copy of psengine in the folder ``package``."""
    # Of an installed distribution pip brings the extra's packages, and leaves the distribution alone.
    source = f"-e '{package.parent}[{extra}]'" if _is_checkout(package) else f"'{DISTRIBUTION}[{extra}]'"
    return f"pip install {source}"


def missing_extra(what: str, error: ImportError, extra: str) -> MissingExtraError:
    """Return the error to raise after ``error``: ``what`` (plural) need a package of ``extra``."""
    return MissingExtraError(
        f"{what} need {error.name or 'a package'} (expected it installed, got: {error}). Fix: {install_command(extra)}"
    )


def build_command(*, package: Path = _PACKAGE) -> str:
    """Return the command that restores the files of that copy, and builds its native extension here."""
    return f"pip install --force-reinstall --no-deps {_source(package)}"


def other_distributions(*, package: Path = _PACKAGE) -> list[str]:
    """Version and folder of each installed distribution ``psengine``, which is another project's."""
    from importlib import metadata  # not at the top: every command imports this module, and few ask

    # A set, because sys.path may name a folder twice. A build leaves psengine.egg-info beside its sources.
    distributions = metadata.distributions(name=OTHER_DISTRIBUTION)
    found = {(Path(str(one.locate_file(""))).resolve(), one.version) for one in distributions}
    sources = package.parent.resolve() if _is_checkout(package) else None
    return [f"psengine {version} in {folder}" for folder, version in found if folder != sources]


def _source(package: Path) -> str:
    """What pip is to install, with its options."""
    if _is_checkout(package):
        return f"-e '{package.parent}'"
    folder = _installed_from(package)
    return f"'{folder}'" if folder else f"--no-binary {DISTRIBUTION} {DISTRIBUTION}"


def _is_checkout(package: Path) -> bool:
    """Whether the sources lie beside the package: installed as editable, or found on PYTHONPATH."""
    return (package.parent / "csrc").is_dir() and (package.parent / "pyproject.toml").is_file()


def _installed_from(package: Path) -> Path | None:
    """The folder of sources that pip installed that copy from (PEP 610: direct_url.json beside its metadata)."""
    from importlib import metadata

    for found in metadata.distributions(name=DISTRIBUTION, path=[str(package.parent)]):
        url = str(json.loads(found.read_text("direct_url.json") or "{}").get("url", ""))
        folder = Path(unquote(urlsplit(url).path))
        if url.startswith("file:") and folder.is_dir():
            return folder
    return None
