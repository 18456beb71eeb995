"""What tests expect inside ranks, where pytest's own assertions are not at hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def raises(error_type: type[BaseException], *texts: str) -> Iterator[None]:
    """Like pytest.raises, for code in ranks; all ``texts`` must stand in the message."""
    try:
        yield
    except error_type as error:
        message = str(error)
    else:
        raise AssertionError(f"{error_type.__name__} was not raised")
    for text in texts:
        assert text in message, f"{text!r} is missing in: {message}"
