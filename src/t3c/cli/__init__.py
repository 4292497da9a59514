"""The command line: `t3c COMMAND --help` says what each takes."""

from __future__ import annotations

import os
import sys

import typer

from t3c.cli.app import app
from t3c.errors import T3CError

__all__ = ["app", "main"]


def main() -> None:
    """Run the command line; bad input is one line and exit code 2."""
    try:
        code = app(sys.argv[1:] or ["--help"], standalone_mode=False)
    except typer.TyperException as error:
        fail(error.format_message())
    except T3CError as error:
        fail(str(error))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except MemoryError:
        fail("there is not enough memory for this")
    except OSError as error:
        fail(f"{error.filename or 'input and output'}: {error.strerror or error}")
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    sys.exit(code if isinstance(code, int) else 0)


def fail(message: str) -> None:
    """Write one line of error and exit with code 2."""
    line = " ".join(message.split())
    sys.stderr.write(f"error: {line}\n")
    sys.exit(2)
