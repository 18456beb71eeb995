"""The hook of the native extension counts as its reference does."""

import itertools
import random

import pytest

from psengine.gradients.ready_counter import LONG_WAY, ReadyCounter
from psengine.kernels import native

needs_extension = pytest.mark.skipif(native.extension is None, reason="the native extension was not built")


class Listener:
    """A reducer that writes down what its hooks call."""

    def __init__(self, buckets, sizes, counts, *, is_native, monkeypatch):
        self.calls = []
        self.counter = ReadyCounter(len(buckets))
        self.counter.lay_out(buckets, sizes)
        self.counter.expect(counts)
        with monkeypatch.context() as patch:
            if not is_native:
                patch.setattr(native, "extension", None)
            self.hooks = [
                self.counter.hook(lambda index: self.calls.append(index), lambda: self.calls.append("full"), index)
                for index in range(len(buckets))
            ]

    def fire(self, index, gradient=0):
        assert self.hooks[index]((), (gradient,)) is None

    def numbers(self):
        return list(self.counter.left), list(self.counter.pending)


@pytest.mark.parametrize("is_native", [False, pytest.param(True, marks=needs_extension)])
def test_gradients_are_counted_down(is_native, monkeypatch):
    listener = Listener([1, 0, 0, None], [2, 2], [1, 1, 2, 1], is_native=is_native, monkeypatch=monkeypatch)
    counts = listener.counter
    counts.ignore()
    listener.fire(0)
    assert not listener.calls

    counts.begin(only_counts=True)
    assert not counts.has_begun
    listener.fire(2)
    assert counts.has_begun
    assert listener.numbers() == ([1, 1, 1, 1], [2, 2, 0, 0])
    listener.fire(1)
    assert counts.missing() == [0, 2, 3]
    listener.fire(2)  # the second time, which makes it ready
    assert listener.calls == ["full"]
    listener.fire(2)  # once too often
    listener.fire(3)  # it has more to do than to count
    assert listener.calls == ["full", 2, 3]
    assert listener.numbers() == ([1, 0, 0, 1], [0, 2, 0, 0])

    listener.fire(0, gradient=None)  # an undefined one
    assert listener.calls == ["full", 2, 3, 0]
    counts.begin(only_counts=False)
    assert listener.numbers() == ([1, 1, 2, 1], [2, 2, 0, 0])
    listener.fire(0)
    assert listener.calls[4:] == [0]


@needs_extension
def test_both_hooks_agree_on_random_backwards(monkeypatch):
    chance = random.Random(0)
    for _ in range(100):
        count = chance.randint(1, 12)
        buckets = [chance.choice([None, 0, 1, 2]) for _ in range(count)]
        sizes = [buckets.count(bucket) for bucket in range(min(3, count))]
        buckets = [None if bucket is None or bucket >= count else bucket for bucket in buckets]
        counts = [chance.choice([0, 1, 1, 2]) for _ in range(count)]
        both = [
            Listener(buckets, sizes, counts, is_native=is_native, monkeypatch=monkeypatch)
            for is_native in (False, True)
        ]
        for _ in range(3):
            only_counts = chance.random() < 0.8
            for listener in both:
                listener.counter.begin(only_counts=only_counts)
            for index in chance.choices(range(count), k=2 * count):
                for listener in both:
                    listener.fire(index)
                assert both[0].calls == both[1].calls
                assert both[0].numbers() == both[1].numbers()


@needs_extension
def test_an_error_of_the_reducer_reaches_autograd(monkeypatch):
    listener = Listener([0], [1], [1], is_native=True, monkeypatch=monkeypatch)
    listener.counter.call()

    def fail(index):
        raise ValueError(f"parameter {index}")

    hook = listener.counter.hook(fail, fail, 0)
    with pytest.raises(ValueError, match="parameter 0"):
        hook((), (None,))


@needs_extension
def test_arrays_that_are_too_short_are_refused():
    long, short = bytearray(8), bytearray(4)
    for arrays in itertools.permutations((long, long, short)):
        with pytest.raises(IndexError, match=r"must have a number for parameter 1 \(got 1 numbers\)"):
            native.extension.counting_hook(*arrays, print, print, 1)
    with pytest.raises(TypeError, match="must be bytearrays of int32"):
        native.extension.counting_hook(long, long, b"12345678", print, print, 1)
    assert LONG_WAY == -1
