"""The native extension's hook counts, and leaves to the long way what needs more."""

import itertools

import pytest

from psengine.gradients.ready_counter import ReadyCounter
from psengine.kernels import native

needs_extension = pytest.mark.skipif(native.extension is None, reason="the native extension was not built")


@pytest.fixture
def calls():
    return []


@pytest.fixture
def counter():
    """Of four parameters: bucket 1 has the first, bucket 0 the next two, and the last must not just be counted."""
    counter = ReadyCounter(4)
    counter.lay_out([1, 0, 0, None], [2, 2])
    counter.expect([1, 1, 2, 1])
    return counter


def fire_all(counter, calls):
    hooks = [counter.hook(lambda index, *_: calls.append(index), lambda: calls.append("full"), i) for i in range(4)]
    return lambda index, gradient=0: hooks[index]((), (gradient,))


@needs_extension
def test_gradients_are_counted_down(counter, calls):
    fire = fire_all(counter, calls)
    counter.ignore()
    fire(0)
    assert not calls

    counter.begin(only_counts=True)
    assert not counter.has_begun
    fire(2)
    assert counter.has_begun
    assert (list(counter.left), list(counter.pending)) == ([1, 1, 1, 1], [2, 2, 0, 0])
    fire(1)
    assert counter.missing() == [0, 2, 3]
    fire(2)  # the second time, which makes it ready
    assert calls == ["full"]
    fire(2)  # once too often
    fire(3)  # it has more to do than to count
    assert calls == ["full", 2, 3]
    assert (list(counter.left), list(counter.pending)) == ([1, 0, 0, 1], [0, 2, 0, 0])

    fire(0, gradient=None)  # an undefined one
    assert calls == ["full", 2, 3, 0]
    counter.begin(only_counts=False)
    assert (list(counter.left), list(counter.pending)) == ([1, 1, 2, 1], [2, 2, 0, 0])
    fire(0)
    assert calls[4:] == [0]


def test_without_the_extension_every_gradient_takes_the_long_way(counter, calls, monkeypatch):
    monkeypatch.setattr(native, "extension", None)
    counter.begin(only_counts=True)
    fire_all(counter, calls)(1)
    assert calls == [1]


@needs_extension
def test_an_error_of_the_reducer_reaches_autograd(counter):
    def fail(index):
        raise ValueError(f"parameter {index}")

    counter.call()
    with pytest.raises(ValueError, match="parameter 0"):
        counter.hook(fail, fail, 0)((), (None,))


@needs_extension
def test_arrays_that_are_too_short_are_refused():
    long, short = bytearray(8), bytearray(4)
    for arrays in itertools.permutations((long, long, short)):
        with pytest.raises(IndexError, match=r"must have a number for parameter 1 \(got 1 numbers\)"):
            native.extension.counting_hook(*arrays, print, print, 1)
    with pytest.raises(TypeError, match="must be bytearrays of int32"):
        native.extension.counting_hook(long, long, b"12345678", print, print, 1)
