"""One JSON document on stdout and everything else on stderr, or tables for a person."""

from __future__ import annotations

import io
import json
import logging
import math
import os
import sys
import tempfile
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, cast

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.table import Table

from loraflow.errors import AdapterError, ConfigError, LoraflowError

__all__ = ["Output", "make_folder", "only_a_document", "ready_stdout", "stdout_failed"]

_FILE_WIDTH = 140  # columns of tables that go to a file or a pipe


@dataclass
class _Stdout:
    """The process's stdout, kept for the document, and whether one was written."""

    file: TextIO
    written: bool = False


_STDOUT: ContextVar[_Stdout | None] = ContextVar("_STDOUT", default=None)


@contextmanager
def only_a_document() -> Iterator[_Stdout]:
    """Inside, all but the document goes to stderr: what libraries print, C ones too, and what child processes do."""
    own = sys.stdout
    try:
        is_real = own.fileno() == 1
    except (AttributeError, OSError):
        is_real = False  # replaced by a test, or by a program that calls this as a library
    if not is_real:
        token = _STDOUT.set(_Stdout(own))
        try:
            with redirect_stdout(sys.stderr):
                yield _STDOUT.get() or _Stdout(own)
        finally:
            _STDOUT.reset(token)
        return
    own.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    file = os.fdopen(kept, "w", encoding="utf-8")
    token = _STDOUT.set(_Stdout(file))
    try:
        yield _STDOUT.get() or _Stdout(file)
    finally:
        _STDOUT.reset(token)
        own.flush()
        os.dup2(kept, 1)
        with suppress(OSError):  # what could not be written was told by whoever wrote it
            file.close()


def ready_stdout() -> None:
    """Let nothing fail for what stdout is: a closed one goes nowhere, what its encoding lacks is written as ``?``."""
    own = cast("TextIO | None", sys.stdout)
    if own is None:
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8")
    elif isinstance(own, io.TextIOWrapper) and own.errors == "strict":
        own.reconfigure(errors="replace")


def stdout_failed(error: OSError) -> int:
    """Say that stdout takes nothing (its disk is full), give up what was not written, and return the exit code."""
    Console(stderr=True, soft_wrap=True).print(
        f"the output cannot be written: {error.strerror or error}", style="red", markup=False, highlight=False
    )
    with suppress(OSError, ValueError):  # else Python tries again as it ends, and tells that with a traceback
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    return 1


class Output:
    """Where a command's result goes.

    Args:
        as_json: One JSON document on stdout; messages and tables go to stderr.
    """

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self._written = False
        self.console = Console(stderr=as_json, soft_wrap=True)
        if not self.console.is_terminal:
            self.console = Console(stderr=as_json, soft_wrap=True, width=_FILE_WIDTH)
        handler = RichHandler(console=Console(stderr=True), show_path=False, show_time=False, markup=False)
        logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler], force=True)
        logging.getLogger("loraflow").setLevel(logging.INFO if not as_json else logging.WARNING)

    def document(self, content: Mapping[str, Any]) -> None:
        """The command's result, for programs: strict JSON, where NaN and infinity are null. Written once."""
        if not self.as_json or self._written:
            return
        self._written = True
        stdout = _STDOUT.get() or _Stdout(sys.stdout)
        stdout.written = True
        stdout.file.write(json.dumps(_plain(content), indent=2, default=str, allow_nan=False) + "\n")
        stdout.file.flush()

    def say(self, text: str, style: str | None = None) -> None:
        """A sentence for a person."""
        self.console.print(text, style=style, markup=False, highlight=False)

    def pairs(self, title: str, rows: Mapping[str, Any]) -> None:
        """A table of names and values."""
        self.table(title, ("", ""), [(name, _text(value)) for name, value in rows.items()], header=False)

    def table(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], *, header: bool = True) -> None:
        """A table."""
        table = Table(title=title, title_justify="left", show_header=header, header_style="bold")
        for column in columns:
            table.add_column(column, overflow="fold")
        for row in rows:
            table.add_row(*(_text(cell) for cell in row))
        self.console.print(table)

    @contextmanager
    def guard(self, code: int = 1) -> Iterator[None]:
        """Turn what goes wrong into a message, a document and an exit code; Ctrl-C into 130."""
        try:
            yield
        except typer.Exit:
            raise
        except LoraflowError as error:
            problems = [problem.to_dict() for problem in error.problems] if isinstance(error, AdapterError) else None
            self.fail(type(error).__name__, str(error), problems)
            raise typer.Exit(code) from error
        except KeyboardInterrupt as error:
            self.fail("KeyboardInterrupt", "interrupted")
            raise typer.Exit(130) from error
        except BrokenPipeError:
            raise  # whoever read the output is gone
        except OSError as error:
            self.fail(type(error).__name__, str(error))
            raise typer.Exit(code) from error
        except Exception as error:
            self.fail(type(error).__name__, f"{error} — not foreseen, please report it: {_place(error)}")
            raise typer.Exit(code) from error

    def fail(self, kind: str, message: str, problems: Sequence[Mapping[str, Any]] | None = None) -> None:
        """Say what went wrong, to programs and to people."""
        content: dict[str, Any] = {"type": kind, "message": message}
        if problems is not None:
            content["problems"] = problems
        text = message if kind == "KeyboardInterrupt" else f"{kind}: {message}"
        Console(stderr=True, soft_wrap=True).print(text, style="red", markup=False, highlight=False)
        self.document({"error": content})


def make_folder(folder: Path) -> None:
    """Make the folder that results go to (``--out``), where it is not there yet, and see that it can be written to.

    Raises:
        ConfigError: It cannot be.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(
            f"nothing can be written to {folder}: {error.strerror or error}", hint="give another folder with --out"
        ) from error


def _place(error: BaseException) -> str:
    """Where in this package ``error`` came up; in the last call where it was elsewhere."""
    calls = traceback.extract_tb(error.__traceback__)
    own = [call for call in calls if f"{os.sep}loraflow{os.sep}" in call.filename]
    call = (own or calls)[-1]
    return f"{Path(call.filename).name}, line {call.lineno}"


def _plain(value: Any) -> Any:
    """``value`` in JSON's types; numbers that JSON has no words for become None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(map(_plain, value), key=str)
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (list, tuple, set, frozenset)):
        return ", ".join(map(str, value)) or "–"
    return str(value)
