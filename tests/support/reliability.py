"""docs/reliability.md: tables that tests have found, between two marks each."""

import os
from collections.abc import Iterable

from tests.support.invocation import ROOT

PAGE = ROOT / "docs" / "reliability.md"
# Where set, what a test finds is written to the page, and else held against it.
WRITES = os.environ.get("WRITE_RELIABILITY") == "1"


class Table:
    """One of the page's tables. A row is a whole line of it."""

    def __init__(self, name: str, columns: Iterable[str]) -> None:
        names = list(columns)
        self._begin, self._end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"
        self._heading = row(*names) + "|---" * len(names) + "|\n"

    def rows(self) -> list[str]:
        """The rows that the page has."""
        section = PAGE.read_text().partition(self._begin)[2].partition(self._end)[0]
        assert section.startswith(self._heading), "run `make reliability`"
        return section.removeprefix(self._heading).splitlines(keepends=True)

    def write(self, rows: Iterable[str]) -> None:
        """Puts these rows in the place of the page's."""
        before, _, rest = PAGE.read_text().partition(self._begin)
        section = self._heading + "".join(rows)
        PAGE.write_text(f"{before}{self._begin}{section}{self._end}{rest.partition(self._end)[2]}")


def row(*cells: object) -> str:
    """The cells as a row."""
    return f"| {' | '.join(map(str, cells))} |\n"
