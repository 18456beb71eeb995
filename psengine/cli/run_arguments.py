"""The command line of ``psengine run``: its own options and torchrun's, then the script with its own arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from typer.core import TyperCommand
from typing_extensions import override

from psengine.errors import ConfigurationError
from psengine.specification import did_you_mean

# Key of the parsed line in a command's ``context.meta``.
PARTS = "psengine.run_arguments"


@dataclass(frozen=True, kw_only=True)
class RunArguments:
    """A command line in its parts.

    Attributes:
        own: options of ``psengine run``, as typer takes them.
        torchrun: torchrun's options by their name, such as "--nnodes", with their values; None for flags.
        script: the script, module or program, and its arguments; [] where none was given.
    """

    own: list[str] = field(default_factory=list)
    torchrun: dict[str, str | None] = field(default_factory=dict)
    script: list[str] = field(default_factory=list)


class ScriptCommand(TyperCommand):
    """A command that takes torchrun's options too; its line ends in a script with the script's own arguments."""

    @override
    def parse_args(self, context: Any, args: list[str]) -> list[str]:
        # Completion, and --help alone, need no launcher.
        if context.resilient_parsing or args[:1] in ([name] for name in context.help_option_names):
            return super().parse_args(context, args)
        own = {
            option: not getattr(parameter, "is_flag", False)
            for parameter in self.get_params(context)
            for option in [*parameter.opts, *parameter.secondary_opts]
        }
        try:
            parts = split_arguments(args, own, {})
        except ConfigurationError:  # not all are ours; torch, which knows torchrun's, takes a second to import
            parts = split_arguments(args, own, torchrun_options(), command=context.command_path)
        context.meta[PARTS] = parts
        return super().parse_args(context, parts.own)

    @override
    def collect_usage_pieces(self, context: Any) -> list[str]:
        return ["[OPTIONS]", "[TORCHRUN OPTIONS]", "SCRIPT.py | -m MODULE", "[ARGUMENTS]..."]


def torchrun_options() -> dict[str, bool]:
    """Each option of torchrun to whether it takes a value."""
    from torch.distributed.run import get_args_parser

    return {
        option: action.nargs != 0
        for action in get_args_parser()._actions
        for option in action.option_strings
        if option not in ("-h", "--help")
    }


def split_arguments(
    arguments: Sequence[str], own: Mapping[str, bool], torchrun: Mapping[str, bool], *, command: str = "psengine run"
) -> RunArguments:
    """Cut ``arguments`` at the script: the first that is no option, or whatever follows ``--``.

    Args:
        arguments: after the command's name.
        own: each option to whether it takes a value.
        torchrun: the same.
        command: named in errors.

    Raises:
        ConfigurationError: an option that nobody knows, or one without its value.
    """
    parts = RunArguments()
    remaining = list(arguments)
    while remaining and remaining[0].startswith("-") and remaining[0] not in ("-", "--"):
        argument = remaining.pop(0)
        name, equals, value = argument.partition("=")
        if torchrun.get(name[:2]) and not name.startswith("--"):
            name, equals, value = name[:2], name[2:], argument[2:]  # -r3
        if name not in own and name not in torchrun:
            hint = did_you_mean(name, sorted({*own, *torchrun})) or f". See {command} --help."
            raise ConfigurationError(
                f"no such option: {name} (expected an option of {command} or of torchrun before the script){hint}"
            )
        takes_value = own[name] if name in own else torchrun[name]
        if takes_value and not equals:
            if not remaining:
                raise ConfigurationError(f"{name} needs a value (expected {name} VALUE, got the end of the line)")
            value = remaining.pop(0)
        if name in own:
            parts.own.extend([name, value] if takes_value else [argument])
        else:
            parts.torchrun[name.replace("_", "-")] = value if takes_value else None
    parts.script.extend(remaining[1:] if remaining[:1] == ["--"] else remaining)
    return parts
