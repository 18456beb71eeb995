"""The steps of one worker: what it exchanges together, and is decided together. Pure.

    a worker's thread   push push push  wait ─ end        push push  wait ─ end
    the I/O thread                          close ── answers ── complete   (one after the other)
    the coordinator                      ECHOED ─ COMMIT, where a rule decides

A step ends when a thread first waits for one of its pushes, or when one of its chunks is pushed again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from psengine.parameter_server.client.operation import Push


@dataclass(eq=False)
class Step:
    """One step.

    Attributes:
        number: 1 for the first of a job; the pushes' sequence.
        end: ends it: later pushes belong to the next step.
        is_ended: nothing is added any more.
        keys: of its chunks.
        has_trained, has_values: whether a parameter's chunk is in it; whether a payload is, of those where there are.
        pushes: in their order. The I/O thread's, as all that follows.
        unanswered: of them.
        is_closed: the I/O thread knows that it has ended.
        attempt: grows when its pushes are confirmed to the coordinator anew.
        is_late: others have completed it without this worker, whose state is from before it: no gradient counts.
    """

    number: int
    end: Callable[[], None]
    is_ended: bool = False
    keys: set[int] = field(default_factory=set)
    has_trained: bool = False
    has_values: bool = False
    pushes: list[Push] = field(default_factory=list)
    unanswered: int = 0
    is_closed: bool = False
    attempt: int = 0
    is_late: bool = False

    def note(self, *, is_trained: bool, has_values: bool) -> None:
        """A push is added."""
        if is_trained and not self.has_trained:
            self.has_trained, self.has_values = True, has_values
        elif is_trained or not self.has_trained:
            self.has_values = self.has_values or has_values


class Steps:
    """See the module's text.

    Args:
        close: called when a step was ended, by the thread that ends it: hands the step to ``close`` on the I/O thread.
        is_shared: servers average: the answers of a step count together.

    Attributes:
        completed: the last step up to which all answers are here.
        is_frozen: no step completes, because the servers may take answers back.
        open: the steps that are not complete, in their order.
        kept: the last complete step, with its answers, where servers average.
        has_failed: a step has ended without all its answers.
    """

    def __init__(self, close: Callable[[Step], None], *, is_shared: bool) -> None:
        self.completed = 0
        self.is_frozen = False
        self.open: list[Step] = []
        self.kept: Step | None = None
        self.has_failed = False
        self._is_shared = is_shared
        self._hand_over = close
        self._next = self._from_step = 1
        self._current: Step | None = None

    # ---- threads of the training -------------------------------------------------------------------------------

    def step_for(self, key: int) -> Step:
        """The step of the chunk's next push."""
        step = self._current
        if step is None or step.is_ended or key in step.keys:
            self.end()
            step = self._current = Step(self._next, self.end)
            self._next += 1
        step.keys.add(key)
        return step

    def end(self) -> None:
        """Later pushes belong to the next step."""
        step, self._current = self._current, None
        if step is not None and not step.is_ended:
            step.is_ended = True
            self._hand_over(step)

    # ---- the I/O thread ----------------------------------------------------------------------------------------

    def begin_at(self, step: int, *, anew: bool, from_step: int = 1) -> None:
        """The next step is ``step``, or a later one of this worker's own; ``anew``: the worker has others' state.

        Others have completed the steps before ``from_step``: a shard that restarted does not know without whom.
        """
        if not anew:
            self._next = max(self._next, step)
            return
        self.forget()
        self.has_failed, self._current = False, None
        self._next, self.completed, self._from_step = step, step - 1, from_step

    def begin(self, push: Push) -> None:
        """A push is about to be sent for the first time."""
        step = push.step
        if not step.pushes:
            self.open.append(step)
        step.pushes.append(push)
        step.unanswered += 1

    def answered(self, push: Push) -> None:
        """A push has its answer."""
        step = push.step
        step.unanswered -= 1
        if step.is_closed and not step.unanswered:
            self.advance()

    def advance(self) -> None:
        """Complete the steps that can be."""
        while self.open and not self.is_frozen and self.open[0].is_closed and not self.open[0].unanswered:
            step = self.open.pop(0)
            step.is_late = step.number < self._from_step
            if not self.has_failed:
                self.completed = step.number
            if not self._is_shared:
                step.pushes.clear()  # they refer to the step: a cycle would keep their answers' memory
                continue
            if self.kept is not None:
                self.kept.pushes.clear()
            self.kept = step
            for push in step.pushes:
                push.complete()

    def failed(self, push: Push) -> list[Push]:
        """A push has no answer, and will have none; where servers average the others of its step fail too: those."""
        step = push.step
        self.has_failed = True
        if self._is_shared:
            if step in self.open:
                self.open.remove(step)
            return [other for other in step.pushes if not other.is_done]
        self.answered(push)
        return []

    def forget(self) -> None:
        """Drop all; cycles of pushes and steps would keep the answers' memory."""
        for step in (*self.open, *([] if self.kept is None else [self.kept])):
            step.pushes.clear()
        self.open.clear()
        self.kept = None

    def take_back(self, from_step: int) -> list[Push]:
        """The servers took back the answers of these steps: all pushes without an answer now, in their order."""
        self._from_step = min(self._from_step, from_step)  # who had completed them is out
        for step in self.open:
            for push in step.pushes if step.number >= from_step else ():
                if push.answer is not None:
                    push.answer = push.pending = None
                    step.unanswered += 1
        return [push for step in self.open for push in step.pushes if push.answer is None and push.error is None]
