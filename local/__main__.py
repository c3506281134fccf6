"""The commands of this folder, as the Makefile calls them: ``python -m local COMMAND``."""

import importlib
import sys

from local import stopping
from local.errors import StackError

COMMANDS = (
    "run",
    "events",
    "ops",
    "demo",
    "sam_local",
    "sam_invoke",
    "clean",
    "schema",
    "openapi",
    "sizes",
    "cfn_guard",
)


def main() -> int:
    """Run the command, a module of that name, and return its exit status: 1 where the stack cannot do it."""
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:  # noqa: PLR2004
        print(f"usage: python -m local {{{','.join(COMMANDS)}}}", file=sys.stderr)
        return 2
    name = sys.argv.pop(1)
    try:
        if name in {"run", "events", "demo", "sam_local"}:
            # They end when told to. Their imports take a second, in which they may be told already.
            stopping.listen()
        status: int = importlib.import_module(f"local.{name}").main()
    except stopping.Stopped:
        return 0
    except (StackError, OSError) as error:
        print(f"\n{error}", file=sys.stderr, flush=True)
        return 1
    return status


if __name__ == "__main__":
    sys.exit(main())
