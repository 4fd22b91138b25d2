"""``trace``: runs a script and writes the timeline of what its models did."""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path
from typing import Any

from roundpipe.errors import ConfigError
from roundpipe.timeline import trace

__all__ = ["add", "run"]


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser("trace", help="run a script and write a timeline of its models")
    parser.add_argument("-o", "--output", default="timeline.json", help="the file to write (default timeline.json)")
    parser.add_argument("script", help="a Python file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    script = Path(arguments.script)
    if not script.is_file():
        raise ConfigError(f"trace: there is no script {arguments.script!r}; give the path of a Python file")
    # As Python itself starts a script.
    sys.argv = [arguments.script, *arguments.arguments]
    sys.path[0] = str(script.parent)
    with trace(arguments.output):
        runpy.run_path(arguments.script, run_name="__main__")
    print(f"timeline written to {arguments.output}", file=sys.stderr)
    return 0
