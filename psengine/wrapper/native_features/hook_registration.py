"""How the wrapped model takes a communication hook."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from psengine.errors import ModuleError
from psengine.gradients.reducer import Reducer
from psengine.strategies.base import Strategy
from psengine.wrapper.native_features.comm_hooks import bucket_hook, builtin_hook, check_comm_hook
from psengine.wrapper.native_features.logging_data import LoggingData


class HookRegistration:
    """The part of ``DistributedDataParallel`` that takes communication hooks."""

    strategy: Strategy
    reducer: Reducer
    logger: LoggingData
    process_group: Any
    _comm_hooks: list[tuple[Callable[..., Any], object]]
    _delay_all_reduce_all_params: bool

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let ``hook(state, bucket)`` exchange each bucket; it returns a future of the bucket's new flat gradients.

        Gradients reach the hook undivided. Once only, before the first backward. See ``native_features/comm_hooks.py``.

        Raises:
            ArgumentTypeError, ConfigurationError: not a hook; see ``check_comm_hook``.
            ReductionError: a hook is registered already.
        """
        try:
            check_comm_hook(hook)
        except Exception as error:
            self.logger.set_error_and_log(f"{type(error)}: {error}")
            raise
        self._install_hook(state, hook, hook.__qualname__)

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        self._install_hook(self.process_group, builtin_hook(comm_hook_type), str(comm_hook_type))

    def _install_hook(self, state: object, hook: Callable[..., Any], name: str) -> None:
        if self._delay_all_reduce_all_params:
            raise ModuleError("all parameters are in delay_all_reduce_named_params; there is no bucket for a hook")
        reducer = self.reducer
        self.strategy.register_comm_hook(bucket_hook(state, hook, lambda: len(reducer.buckets)))
        self._comm_hooks.append((hook, state))
        self.logger._set_comm_hook_name(name)
