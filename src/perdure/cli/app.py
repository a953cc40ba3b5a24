"""All commands, with one line each; their options and their work are in the file of their family."""

from __future__ import annotations

from typing import Annotated

import typer

from perdure import __version__
from perdure.cli.demo import demo
from perdure.cli.doctor import doctor
from perdure.cli.maintenance import backup, compact, delete_store, prune, restore
from perdure.cli.mcp import mcp
from perdure.cli.processes import logs, processes, ps, signal
from perdure.cli.retry import retry
from perdure.cli.run import call, operations, run, send, steer
from perdure.cli.sessions import answer, approve, cancel, delete, fork, pending, reject, sessions, settle, show
from perdure.cli.usage import usage
from perdure.cli.worker import worker
from perdure.cli.workers import workers

app = typer.Typer(
    name="perdure",
    help="Durable agents: watch one, run one, look after a store.\n\n"
    "The store is [bold].perdure/runtime.db[/bold] unless --store or PERDURE_STORE names another. All commands work "
    "while other processes have the same store open.",
    rich_markup_mode="rich",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"perdure {__version__}")
        raise typer.Exit


@app.callback()
def _perdure(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None: ...


WORK, LOOK, DECIDE, KEEP = "Run agents", "Look", "Decide", "Look after a store"

app.command(rich_help_panel=WORK)(demo)
app.command(rich_help_panel=WORK)(run)
app.command(rich_help_panel=WORK)(send)
app.command(rich_help_panel=WORK)(steer)
app.command(rich_help_panel=WORK)(worker)
app.command(rich_help_panel=WORK)(mcp)
app.command(rich_help_panel=LOOK)(sessions)
app.command(rich_help_panel=LOOK)(show)
app.command(rich_help_panel=LOOK)(pending)
app.command(rich_help_panel=LOOK)(ps)
app.command(rich_help_panel=LOOK)(logs)
app.command(rich_help_panel=LOOK)(operations)
app.command(rich_help_panel=LOOK)(usage)
app.command(rich_help_panel=LOOK)(workers)
app.command(rich_help_panel=LOOK)(doctor)
app.command(rich_help_panel=DECIDE)(approve)
app.command(rich_help_panel=DECIDE)(answer)
app.command(rich_help_panel=DECIDE)(reject)
app.command(rich_help_panel=DECIDE)(settle)
app.command(rich_help_panel=DECIDE)(call)
app.command(rich_help_panel=DECIDE)(signal)
app.command(rich_help_panel=DECIDE)(cancel)
app.command(rich_help_panel=DECIDE)(retry)
app.command(rich_help_panel=DECIDE)(fork)
app.command(rich_help_panel=DECIDE)(delete)
app.command(rich_help_panel=KEEP)(backup)
app.command(rich_help_panel=KEEP)(restore)
app.command(rich_help_panel=KEEP)(compact)
app.command(rich_help_panel=KEEP)(prune)
app.command(rich_help_panel=KEEP)(delete_store)
app.add_typer(processes, name="processes", rich_help_panel=DECIDE)
