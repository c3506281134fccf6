"""The commands of this folder, as the Makefile calls them: ``python -m local COMMAND``."""

import importlib
import sys

from local import stopping

COMMANDS = ("run", "events", "demo", "schema", "openapi")


def main() -> int:
    """Run the command, a module of that name, and return its exit status."""
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:  # noqa: PLR2004
        print(f"usage: python -m local {{{','.join(COMMANDS)}}}", file=sys.stderr)
        return 2
    name = sys.argv.pop(1)
    try:
        if name in {"run", "events"}:
            # They end when told to. Their imports take a second, in which they may be told already.
            stopping.listen()
        status: int = importlib.import_module(f"local.{name}").main()
    except stopping.Stopped:
        return 0
    return status


if __name__ == "__main__":
    sys.exit(main())
