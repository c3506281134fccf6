"""Benchmarks: ``python -m bench [NAME ...] [--quick]``, or ``make bench``. docs/performance.md says what they mean."""

import argparse
import importlib
import sys

from bench import reporting, server
from local import stopping
from local.errors import StackError

BENCHMARKS = ("charge", "relay", "backlog", "cold", "latency", "webhooks", "model")


def main() -> int:
    """Measure, print tables, and write JSON into bench/results."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=main.__doc__)
    parser.add_argument("benchmarks", nargs="*", choices=BENCHMARKS, help="all of them, unless named")
    parser.add_argument(
        "--quick", action="store_true", help="a tenth of the work or less: to try it, not to believe it"
    )
    arguments = parser.parse_args()
    folder = server.RESULTS / "quick" if arguments.quick else server.RESULTS
    stopping.listen()
    try:
        with server.databases() as databases:
            for name in arguments.benchmarks or BENCHMARKS:
                reporting.progress(name)
                benchmark = importlib.import_module(f"bench.{name}")
                report = benchmark.run(databases, benchmark.QUICK if arguments.quick else benchmark.FULL)
                reporting.show(report)
                reporting.write(report, folder)
    except stopping.Stopped:
        return 130
    except StackError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    print(f"\nWritten to {folder}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
