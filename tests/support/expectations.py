"""What tests expect inside ranks, where pytest's own assertions are not at hand."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


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


def assert_identical(got: Any, expected: Any) -> None:
    """Same structure, types, dtypes and bits."""
    assert type(got) is type(expected), (got, expected)
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
        assert not got.requires_grad
        return
    if isinstance(expected, dict):
        assert list(got) == list(expected)
        got, expected = list(got.values()), list(expected.values())
    if isinstance(expected, list | tuple):
        for one, other in zip(got, expected, strict=True):
            assert_identical(one, other)
    else:
        assert repr(got) == repr(expected)
