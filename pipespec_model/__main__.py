"""The console script ``pipespec``: maps a sub-command to its package and imports it when called, so
that ``pipespec --help`` answers at once."""

from __future__ import annotations

import sys
from importlib import import_module

COMMANDS = {
    "validate": "calibrate, predict, measure and report (the main job); validate published: runs of others",
    "execute": "generate text, calibrate a pipeline, strategies side by side",
    "simulate": "simulate a pipeline, choose lookaheads, draw a timeline",
}


def usage() -> str:
    lines = ["usage: pipespec COMMAND [ARGUMENTS]; pipespec COMMAND --help tells more", ""]
    lines += [f"  {name:9} {text}" for name, text in COMMANDS.items()]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    args = sys.argv[1:] if argv is None else argv
    if not args or args[0] in ("-h", "--help"):
        print(usage())
        raise SystemExit(0)
    if args[0] == "--version":
        from importlib.metadata import version

        print(f"pipespec {version('pipespec')}")
        raise SystemExit(0)
    if args[0] not in COMMANDS:
        print(f"pipespec: command must be one of {', '.join(COMMANDS)}, got {args[0]!r}", file=sys.stderr)
        raise SystemExit(2)
    # A sub-command of its own package: it never loads torch, which validate does.
    package, rest = ("validate.published", args[2:]) if args[:2] == ["validate", "published"] else (args[0], args[1:])
    import_module(f"{package}.__main__").main(rest)


if __name__ == "__main__":
    main()
