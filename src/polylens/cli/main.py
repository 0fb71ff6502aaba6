"""The `polylens` command: its subcommands, and the border where errors become one line and an exit code."""

from __future__ import annotations

import os
import sys
import warnings
from typing import Annotated, NoReturn

import typer
from typer.exceptions import TyperException

from polylens import __version__
from polylens.cli import batch, bench, demo, deploy, inspect, merge, plan, run, serve, verify
from polylens.errors import PolylensError

EXIT_OK = 0
EXIT_WRONG_INPUT = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it

EPILOG = (
    "Exit codes: 0 done, 1 a check says no (inspect, verify, demo), 2 wrong input (one line on stderr), 130 Ctrl-C."
)

app = typer.Typer(
    name="polylens",
    help="One vision-language model in memory, many LoRA adapters over it, mixed in one batch. "
    "Adapters may change the vision tower, the connector and the language model.",
    epilog=EPILOG + " `polylens COMMAND --help` tells more.",
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _name, _function, _short_help in (
    ("run", run.run, "Answer one prompt, with an adapter or the base model."),
    ("batch", batch.batch, "Answer a file of requests, all adapters in one batch."),
    ("inspect", inspect.inspect, "Show what is in an adapter, and whether it fits a model."),
    ("plan", plan.plan, "Show how memory would be divided for a model."),
    ("merge", merge.merge, "Write a model with one adapter merged into its weights."),
    ("verify", verify.verify, "Check that adapters answer as merged checkpoints do."),
    ("bench", bench.bench, "Measure speed and memory on this machine."),
    ("demo", demo.demo, "See it work on a tiny model that comes with polylens."),
):
    app.command(_name, short_help=_short_help)(_function)
# Their flags are a table of their own (see serve_flags), read by argparse.
for _name, _command, _short_help in (
    ("serve", serve.serve, "Serve all adapters over HTTP, as OpenAI's API."),
    ("deploy", deploy.deploy, "Serve with several replicas, under Ray Serve."),
):
    app.command(
        _name,
        short_help=_short_help,
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    )(_command)


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(f"polylens {__version__}")
        raise typer.Exit()
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main() -> NoReturn:
    """Run the command line and exit the process with its code (see EPILOG)."""
    _quiet_libraries()
    try:
        code = app(standalone_mode=False)
    except TyperException as error:  # a mistyped command or option
        code = _fail(f"{error.format_message()} (try `polylens --help`)")
    except BrokenPipeError:  # the reader of our output went away, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = EXIT_OK
    except (PolylensError, OSError) as error:
        code = _fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
        code = EXIT_INTERRUPTED
    sys.exit(code or EXIT_OK)


def _fail(message: str) -> int:
    """Print `message` as one line on stderr and give the exit code for wrong input."""
    print("polylens: error:", " ".join(message.split()), file=sys.stderr)
    return EXIT_WRONG_INPUT


def _quiet_libraries() -> None:
    """Keep library chatter off stderr, where it would hide the one line that matters; the user's settings win."""
    if not sys.warnoptions:
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", category=DeprecationWarning)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the profiler, which measures memory, warns of every start
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # each of its retries is a warning
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "0" if sys.stderr.isatty() else "1")


if __name__ == "__main__":
    main()
