"""The commands of this folder, as the Makefile calls them: ``python -m local COMMAND``."""

import importlib
import sys

COMMANDS = ("run", "events", "demo", "schema")


def main() -> int:
    """Run the command, a module of that name."""
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:  # noqa: PLR2004
        print(f"usage: python -m local {{{','.join(COMMANDS)}}}", file=sys.stderr)
        return 2
    command = importlib.import_module(f"local.{sys.argv.pop(1)}")
    status: int = command.main()
    return status


if __name__ == "__main__":
    sys.exit(main())
