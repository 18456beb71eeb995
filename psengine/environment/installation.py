"""The pip commands that fit how this copy of psengine was installed.

The distribution is called ``psengine-torch``, the package ``psengine``. On the package index ``psengine`` is another
project's distribution; its package has the same name, and would overwrite this one.
"""

from __future__ import annotations

from pathlib import Path

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
    if _is_checkout(package):
        return f"pip install --force-reinstall --no-deps -e '{package.parent}'"
    return "in psengine's folder: pip install --force-reinstall --no-deps ."


def other_distributions(*, package: Path = _PACKAGE) -> list[str]:
    """Version and folder of each installed distribution ``psengine``, which is another project's."""
    from importlib import metadata  # not at the top: every command imports this module, and few ask

    # A set, because sys.path may name a folder twice. A build leaves psengine.egg-info beside its sources.
    distributions = metadata.distributions(name=OTHER_DISTRIBUTION)
    found = {(Path(str(one.locate_file(""))).resolve(), one.version) for one in distributions}
    sources = package.parent.resolve() if _is_checkout(package) else None
    return [f"psengine {version} in {folder}" for folder, version in found if folder != sources]


def _is_checkout(package: Path) -> bool:
    """Whether the sources lie beside the package: installed as editable, or found on PYTHONPATH."""
    return (package.parent / "csrc").is_dir() and (package.parent / "pyproject.toml").is_file()
