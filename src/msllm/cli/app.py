"""`msllm`: finds the command, imports it only when it is run, and turns errors into exit statuses.

What a command does is in its own module. Nothing heavy is imported here, so that `msllm --help`
answers at once; one table below says which module holds which command.
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from msllm.cli import render, streams
from msllm.errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_USAGE,
    InputError,
    MsllmError,
    closest,
)

UsageError: Any = typer.BadParameter.__mro__[1]
"""Typer's own error about wrong usage, which it does not export by name."""

EPILOG = "Start with `msllm list-models`; `msllm COMMAND --help` shows examples of each command."


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a command is: a function or a Typer app in a module.

    `summary` repeats the first line of its help (a test compares them), so that listing the
    commands imports none of them.
    """

    module: str
    attribute: str
    summary: str

    def load(self, name: str) -> Any:
        """Import the command and make it runnable."""
        module = importlib.import_module(self.module)
        target = getattr(module, self.attribute)
        if isinstance(target, typer.Typer):
            return typer.main.get_command(target)
        app = typer.Typer(add_completion=False, rich_markup_mode="rich")
        app.command(name, epilog=getattr(module, "EPILOG", None))(target)
        return typer.main.get_command(app)


COMMANDS: dict[str, Entry] = {
    "list-models": Entry(
        "msllm.cli.list_models", "list_models", "List the models that msllm knows."
    ),
    "show-model": Entry(
        "msllm.cli.show_model", "show_model", "Show a model's shape, size and recipes."
    ),
    "download": Entry(
        "msllm.cli.download",
        "download",
        "Download a published model: config, tokenizer and weights.",
    ),
    "tokenizer": Entry("msllm.cli.tokenizer", "app", "Make a tokenizer."),
    "convert": Entry(
        "msllm.cli.convert", "app", "Convert weights between Hugging Face and Megatron-core."
    ),
    "preprocess": Entry(
        "msllm.cli.preprocess",
        "preprocess",
        "Turn text files into an indexed data set for `msllm pretrain`.",
    ),
    "pretrain": Entry("msllm.cli.pretrain", "pretrain", "Train a model on text."),
    "plan": Entry(
        "msllm.cli.plan",
        "plan",
        "Plan a run: memory, traffic and speed by layout, without devices.",
    ),
    "doctor": Entry(
        "msllm.cli.doctor",
        "doctor",
        "Tell whether this machine is fit to train, and what would mend it.",
    ),
    "generate": Entry(
        "msllm.cli.generate",
        "generate",
        "Continue a prompt with a run's newest checkpoint, by greedy decoding.",
    ),
    "plot": Entry(
        "msllm.cli.plot",
        "plot",
        "Draw loss and throughput curves of runs, to a picture and to the terminal.",
    ),
}


class LazyGroup(TyperGroup):
    """A group whose commands are imported one at a time, when they are asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of all commands, in the order of a project's work."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import a command."""
        entry = COMMANDS.get(cmd_name)
        return entry.load(cmd_name) if entry else None

    def _meant(self, ctx: Any, name: str) -> str:
        """The command that a wrong name is closest to; one of a group's, if it is called so."""
        for group in (g for g, entry in COMMANDS.items() if entry.attribute == "app"):
            if name in self.get_command(ctx, group).commands:
                return f"{group} {name}"
        return closest(name, list(COMMANDS), 1)[0]

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Find the command, and let its options that may be repeated take several values."""
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            raise InputError(
                f"unknown command {args[0]!r}",
                "msllm",
                f"did you mean `{self._meant(ctx, args[0])}`? `msllm --help` lists all",
            )
        name, command, rest = super().resolve_command(ctx, args)
        leaf: Any = command
        start = 0
        while start < len(rest) and rest[start] in getattr(leaf, "commands", {}):
            leaf, start = leaf.commands[rest[start]], start + 1
        return name, command, rest[:start] + spread(rest[start:], repeatable(leaf))

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List the commands from the table, importing none."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.summary) for name, entry in COMMANDS.items()])


def repeatable(command: Any) -> set[str]:
    """Options of a command that may be given several times.

    Empty if it also has arguments, which could not be told from the options' values.
    """
    if any(parameter.param_type_name == "argument" for parameter in command.params):
        return set()
    return {option for p in command.params if getattr(p, "multiple", False) for option in p.opts}


def spread(args: Sequence[str], options: set[str]) -> list[str]:
    """Write `--data a b` as `--data a --data b`, for the given options."""
    result: list[str] = []
    option, waiting = None, False
    for position, arg in enumerate(args):
        if arg == "--":
            return result + list(args[position:])
        if arg.startswith("-") and len(arg) > 1 and not waiting:
            option = arg if arg in options else None
            waiting = option is not None
        elif option is not None and not waiting:
            result.append(option)
        else:
            waiting = False
        result.append(arg)
    return result


app = typer.Typer(
    name="msllm",
    cls=LazyGroup,
    help="Train large language models on Ascend NPUs, and try it all on a plain CPU.",
    epilog=EPILOG,
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode=None,
)


def _print_version(value: bool) -> None:
    if value:
        from msllm import __version__

        print(f"msllm {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="print the version"),
    ] = False,
    debug: Annotated[
        bool,
        typer.Option("--debug", help="show tracebacks; the same as MSLLM_DEBUG=1"),
    ] = False,
) -> None:
    """Train large language models on Ascend NPUs, and try it all on a plain CPU."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Console entry point: run a command line and exit with its status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    sys.exit(run(given))


def run(arguments: list[str]) -> int:
    """Run a command line; print what went wrong, and return the exit status."""
    arguments, debug = _take_debug(arguments)
    streams.prepare()
    try:
        status = typer.main.get_command(app).main(
            arguments, prog_name="msllm", standalone_mode=False
        )
        streams.finish()
    except MsllmError as error:
        render.show_error(error, debug)
        return error.exit_status
    except UsageError as error:
        return _show_usage_error(error)
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        streams.give_up()  # the reader, `head` say, has seen enough: end quietly
        return EXIT_FAILED
    except Exception as error:
        known = _known(error, arguments)
        if known is None:
            return render.show_defect(error, debug)
        render.show_error(known, debug)
        return known.exit_status
    return status if isinstance(status, int) else EXIT_OK


def _known(error: Exception, arguments: list[str]) -> MsllmError | None:
    """Say what any command may meet in the paths that it is given; None for a defect."""
    if isinstance(error, RuntimeError) and "home directory" in str(error):
        named = next((a for a in arguments if "~" in a), "")
        return InputError("there is no user of that name, whose home ~ stands for", named)
    if not isinstance(error, OSError):
        return None
    if error.errno == errno.ENAMETOOLONG:
        return InputError("a path is too long", str(error.filename)[:60] + "...")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        where = "" if error.filename is None else str(error.filename)
        return InputError("you may not read or write it", where, "ask its owner, or chmod it")
    return streams.fault("\n") if error.filename is None else None


def _take_debug(arguments: list[str]) -> tuple[list[str], bool]:
    """Take `--debug` out, wherever it stands; MSLLM_DEBUG=1 says the same, also to workers."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    debug = "--debug" in arguments[:end]
    if debug:
        os.environ["MSLLM_DEBUG"] = "1"
    kept = [a for a in arguments[:end] if a != "--debug"] + arguments[end:]
    return kept, debug or os.environ.get("MSLLM_DEBUG", "0") not in ("", "0")


def _show_usage_error(error: Any) -> int:
    """Show a wrong option or value with the nearest right one."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return EXIT_USAGE
    context = error.ctx
    path = context.command_path if context is not None else "msllm"
    hint = f"see `{path} --help`"
    if (unknown := getattr(error, "option_name", None)) and type(error).__name__ == "NoSuchOption":
        options = [o for p in context.command.params for o in p.opts if o.startswith("--")]
        hint = f"did you mean {closest(unknown, options, 1)[0]}? {hint}" if options else hint
        message = f"unknown option {unknown}"
    else:
        message = error.format_message().rstrip(".")
    render.show_error(InputError(message, path, hint), debug=False)
    return EXIT_USAGE
