"""What to tell whoever waits for a server that refuses, or does not answer."""

from __future__ import annotations

from psengine.errors import FencedError, ServerLostError, ServerRefusedError
from psengine.parameter_server.client.operation import Operation, Push, Request
from psengine.protocol.messages import ErrorCode, MessageType


def refusal(address: str, operation: Operation | None, code: str, text: str) -> ServerRefusedError:
    """The server at ``address`` answered by ERROR."""
    kind = FencedError if code == ErrorCode.FENCED else ServerRefusedError
    asked = f" {operation.describe()}" if operation is not None else ""
    return kind(f"{address} refused{asked} ({code}): {text}", code)


def says_hello_again(operation: Operation | None, code: str) -> bool:
    """Whether this refusal means that the worker lost its membership, so that a recovery has to follow."""
    if isinstance(operation, Request) and operation.handles_refusal:
        return False
    if operation is not None and operation.message.type is MessageType.ADMIT and code == ErrorCode.NOT_READY:
        return True  # the server knows this worker, and exchanges do not wait for it any more
    return code in (ErrorCode.FENCED, ErrorCode.NOT_MEMBER)


def no_answer(
    address: str, operation: Operation, last_heard_s: float | None, last_problem: str, now_s: float
) -> ServerLostError:
    """The deadline of ``operation`` has passed.

    Args:
        address: of the server.
        operation: what was asked.
        last_heard_s: when anything came from it; None never.
        last_problem: what went wrong last; "" nothing.
        now_s: the time.
    """
    waited = f"{now_s - operation.submitted_s:.1f} s"
    heard = "it was never heard from" if last_heard_s is None else f"last heard from {now_s - last_heard_s:.1f} s ago"
    problem = operation.last_refusal or last_problem
    remark = f" The last problem was: {problem}." if problem else ""
    if isinstance(operation, Push) and operation.waiting_for is not None:
        whom = f"workers {operation.waiting_for}" if operation.waiting_for else "other workers"
        return ServerLostError(
            f"{address} holds {operation.describe()} since {waited} and waits for {whom} ({heard}).{remark} Is a worker"
            " stuck, or much slower than the others? Raise timeout_s if it is slow."
        )
    return ServerLostError(
        f"{address} did not answer {operation.describe()} for {waited} ({heard}).{remark} Is psengine-server running"
        " there, and is the port reachable from this host? If it is slow, raise the timeout: timeout_s, or --timeout-s"
        " of a command."
    )
