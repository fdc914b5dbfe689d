"""The command line: thin commands over the package, with every failure in words.

A new command is one function with typer's ``command`` decorator; it imports what it needs inside, so that ``kvlab --help`` stays
quick. Exit status: 0 all well, 1 partly read or a difference found, 2 nothing usable.
"""

from __future__ import annotations

import json
import os
import re
import sys
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path  # noqa: TC003 - typer reads the signatures when it runs
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvlab.demo import Situation

SOME_USABLE = 1
NOTHING_USABLE = 2
INTERRUPTED = 130


class _InWords(TyperGroup):
    """Failures are shown as one sentence on stderr, never as a traceback (which KVLAB_DEBUG=1 shows)."""

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401 - click's own signature
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            typer.echo("kvlab: Interrupted.", err=True)
            raise typer.Exit(INTERRUPTED) from None
        except Exception as error:
            if hasattr(error, "exit_code") or isinstance(error, (typer.Abort, BrokenPipeError)) or os.environ.get("KVLAB_DEBUG"):
                raise  # typer and click already say what they have to say
            from kvlab.engine.errors import in_words

            typer.echo(f"kvlab: {in_words(error)}", err=True)
            raise typer.Exit(NOTHING_USABLE) from None


app = typer.Typer(cls=_InWords, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def _kvlab() -> None:
    """See prefix caching happen on a real model."""


class Dtype(StrEnum):
    """In which numbers the embedded model is kept on disk."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


@app.command()
def fetch(
    dtype: Annotated[
        Dtype, typer.Option(help="float32 loses nothing; bfloat16 is half as large, for small machines.")
    ] = Dtype.FLOAT32,
) -> None:
    """Fetch the embedded model if it is not there, verify every byte of it, repair it where it is damaged."""
    from kvlab.engine import embedded, memory

    with progress_bar() as progress:
        folder = embedded.fetch(dtype.value, progress=progress)
    size = memory.in_words(sum(file.stat().st_size for file in folder.iterdir()))
    typer.echo(f"{embedded.EMBEDDED.model} ({dtype.value}, {size}) is verified: {folder}")


@app.command()
def demo(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="print one object a situation, and nothing else, on stdout")] = False,
    full: Annotated[bool, typer.Option("--full", help="a long answer of 2,000 tokens on a CPU too (minutes)")] = False,
    long_answer: Annotated[
        int | None, typer.Option(min=1, max=2000, help="tokens of the long answer [200 on a CPU, 2,000 on a GPU]")
    ] = None,
    model: Annotated[str | None, typer.Option(help="a folder, a GGUF file or a hub id instead of the embedded model")] = None,
) -> None:
    """Run the article's four situations on the real model, both caches: tokens skipped, prefill and decode seconds, and why."""
    from kvlab import demo as four
    from kvlab.engine.models import load_model

    if full and long_answer is not None:
        msg = "--full and --long-answer both say how long the long answer is: give one of them."
        raise typer.BadParameter(msg)
    with progress_bar() as progress:
        loaded = load_model(model, progress=progress)
    with progress_bar() as progress:
        found: list[Situation] = []
        tell = lambda text: progress(len(found) / len(four.LAYOUTS), text)  # noqa: E731 - short and used once
        for situation in four.situations(loaded, long_answer=four.FULL_ANSWER if full else long_answer, tell=tell):
            found.append(situation)
            if as_json:
                typer.echo(json.dumps(situation.plain()))
    if not as_json:
        _print_demo(found, repr(loaded))


def _print_demo(found: list[Situation], about: str) -> None:
    """Print the situations as a table, with the reasons below."""
    from rich.console import Console
    from rich.table import Table

    from kvlab.demo import POLICY

    out = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    table = Table(title=about, title_justify="left", caption="of each situation's second request; the first one filled the cache")
    for name in ("situation", "cache", "tokens skipped", "prefill", "without reuse", "decode", "output tokens"):
        table.add_column(name, justify="left" if name in ("situation", "cache") else "right")
    for s in found:
        for i, (policy, side) in enumerate(s.sides.items()):
            skipped = f"{side.cached_tokens:,} of {s.prompt_tokens:,}"
            seconds = (side.prefill_seconds, side.full_seconds, side.decode_seconds)
            times = ("" if s is None else f"{s:.2f} s" for s in seconds)
            name = "" if i else s.name
            table.add_row(name, POLICY[policy], skipped, *times, f"{side.output_tokens:,}", end_section=i == len(s.sides) - 1)
    out.print(table)
    for s in found:
        out.print(f"[bold]{s.name}[/bold]")
        for policy, side in s.sides.items():
            out.print(f"  {POLICY[policy]}: {side.why}", markup=False)


@app.command()
def replay(
    traces: Annotated[list[Path], typer.Argument(help="recorded operations, JSON lines as in tests/golden")],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="print one object an operation, with the fields of `expect`")] = False,
    check: Annotated[bool, typer.Option("--check", help="compare with each `expect`; exit 1 where one differs")] = False,
) -> None:
    """Run recorded operations through the caches, without a model, and tell or compare what they do."""
    operations = problems = 0
    for path in traces:
        done, problem = _replay(path, as_json=as_json, check=check)
        operations += done
        if problem:
            problems += 1
            typer.echo(f"kvlab: {problem}", err=True)
    if problems:
        raise typer.Exit(SOME_USABLE if operations else NOTHING_USABLE)


def _replay(path: Path, *, as_json: bool, check: bool) -> tuple[int, str]:
    """Run one trace and print what it did; return how many operations ran, and in words what is wrong with it."""
    from kvlab.trace.lines import ReplayError
    from kvlab.trace.replay import Difference, difference, open_replay

    done = compared = 0
    found: list[Difference] = []
    try:
        with path.open(encoding="utf-8-sig") as lines:
            trace = open_replay(lines, str(path))
            for step in trace:
                done += 1
                if as_json:
                    typer.echo(json.dumps(step.result))
                if check and step.expect is not None:
                    compared += 1
                    found += filter(None, [difference(step, str(path))])
    except ReplayError as error:
        return done, " ".join(map(str, [*found[:1], error]))
    except BrokenPipeError:  # whoever reads the output has seen enough
        raise
    except OSError as error:
        return done, f"{path} cannot be read: {error.strerror}."
    if not as_json:
        told = f", {compared - len(found):,} of {compared:,} as recorded" if check else ""
        typer.echo(f"{path}: {done:,} operations{told}; {trace.summary()}")
    if check and not compared:
        return done, f"{path} holds no `expect`: there is nothing to compare."
    if len(found) > 1:
        return done, f"{found[0]} {len(found):,} operations differ."
    return done, str(found[0]) if found else ""


@contextmanager
def progress_bar() -> Iterator[Callable[[float, str], None]]:
    """Give a callable (fraction, text) that shows a bar on stderr, or a line for each new task where that is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    if not sys.stderr.isatty():
        told: set[str] = set()

        def tell(fraction: float, text: str) -> None:  # noqa: ARG001 - a line says no fraction
            task = re.split(r": | \(", text, maxsplit=1)[0]
            if task not in told:
                told.add(task)
                typer.echo(task, err=True)

        yield tell
        return
    columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda fraction, text: bar.update(task, completed=fraction, description=text)
