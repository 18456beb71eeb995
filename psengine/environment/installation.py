"""The pip commands of messages.

The distribution is called ``psengine-torch``, the package ``psengine``. On the package index ``psengine`` is another
project's distribution; its package has the same name, and would overwrite this one.
"""

from __future__ import annotations

from psengine.errors import MissingExtraError

OTHER_DISTRIBUTION = "psengine"
BUILD_COMMAND = "in psengine's folder: pip install --force-reinstall --no-deps . (-e . where it is editable)"


def missing_extra(what: str, error: ImportError, extra: str) -> MissingExtraError:
    """Return the error to raise after ``error``: ``what`` (plural) need a package of ``extra``."""
    # Of an installed distribution pip brings the extra's packages, and leaves the distribution alone.
    return MissingExtraError(
        f"{what} need {error.name or 'a package'} (expected it installed, got: {error}). Fix: pip install"
        f" 'psengine-torch[{extra}]'"
    )
