"""The command line: ``dash-attn`` or ``python -m dash_attn``.

Every command has ``--help`` with an example and ``--json`` for one JSON object on standard output.
Errors go to standard error and end with exit code 2; ``demo`` and ``verify`` end with 1 when
bytes differ; an interrupt (Ctrl-C) ends with 130.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from .. import __version__
from ..errors import DashError
from .commands import add_demo, add_running_commands
from .schedules import add_schedule_commands

__all__ = ["main"]

INTERRUPTED = 130
"""What shells report for a program that Ctrl-C ended: 128 and the number of the signal."""


_NO_MEMORY = "can't allocate memory", "out of memory"
"""What PyTorch says on the CPU and on a GPU."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    args = _parser().parse_args(argv)
    try:
        code: int = args.run(args)
        return code
    except BrokenPipeError:
        # Whoever read the output has gone; what was printed before is all they wanted.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        # The terminal shows ^C, or half a progress bar, on the line where the cursor stands.
        print(f"\ndash-attn {args.command}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except (DashError, ImportError, OSError, MemoryError) as error:
        print(f"dash-attn {args.command}: {str(error) or 'no memory is left'}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        if not any(words in str(error) for words in _NO_MEMORY):
            raise
        print(f"dash-attn {args.command}: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dash-attn", description="Bitwise-reproducible attention: plans, their proofs and their speed."
    )
    parser.add_argument("--version", action="version", version=f"dash-attn {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_demo(subparsers)
    add_schedule_commands(subparsers)
    add_running_commands(subparsers)
    return parser
