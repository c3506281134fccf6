"""The model of how far the service goes: docs/scaling.md and docs/deploy.md say what it says, and it says what is so.

With WRITE_SCALING=1 (`make scaling`) the pages' tables are written instead.
"""

import math
import os
import re
from pathlib import Path

import pytest

from bench import aws, sizing
from bench.reporting import Table
from tests.packaging.artifacts import TEMPLATE
from tests.support.invocation import ROOT

SCALING = ROOT / "docs" / "scaling.md"
DEPLOY = ROOT / "docs" / "deploy.md"
WRITES = os.environ.get("WRITE_SCALING") == "1"


def markdown(table: Table) -> str:
    """The table as it stands on a page."""
    rows = [f"| {' | '.join(cells)} |\n" for cells in (table.columns, *table.rows)]
    return rows[0] + "|" + "---|" * len(table.columns) + "\n" + "".join(rows[1:])


def held(page: Path, found: str, expected: str) -> None:
    """Holds a page's part against the model, or puts the model's in its place."""
    if WRITES:
        page.write_text(page.read_text().replace(found, expected))
    else:
        assert found == expected, "if that is meant, run `make scaling`"


@pytest.mark.parametrize("name", [name for name in sizing.tables() if name != "bill"])
def test_the_page_on_scaling_has_the_models_tables(name: str) -> None:
    """Word for word."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"
    found = re.search(f"{begin}(?s:.*){end}", SCALING.read_text())
    assert found is not None
    held(SCALING, found[0], begin + markdown(sizing.tables()[name]) + end)


def test_the_page_on_deploying_has_the_models_bill() -> None:
    """Line for line: the formulas are the page's, and the figures the model's."""
    page = DEPLOY.read_text()
    section = page[page.index("## What it costs") :]
    rows = re.findall(r"(?m)^\|.*\| ((?:\**[\d,]+\** \| ){2}\**[\d,]+\**) \|$", section)
    bill = [" | ".join(row[1:]) for row in sizing.tables()["bill"].rows]
    assert len(rows) == len(bill)
    if WRITES:
        lines = iter(bill)
        written = re.sub(
            r"(?m)^(\|.*\| )(?:\**[\d,]+\** \| ){2}\**[\d,]+\** \|$", lambda line: f"{line[1]}{next(lines)} |", section
        )
        DEPLOY.write_text(page.replace(section, written))
    else:
        assert rows == bill, "if that is meant, run `make scaling`"


@pytest.mark.parametrize("busy", [0.02, 0.2, 2.0, 20.0, 200.0])
def test_so_many_instances_are_enough_and_one_less_is_not(busy: float) -> None:
    """By the Poisson distribution itself, summed up from below."""

    def missing(count: int) -> float:
        return 1 - math.fsum(math.exp(n * math.log(busy) - busy - math.lgamma(n + 1)) for n in range(count + 1))

    count = sizing.instances(busy, 1.0)
    assert missing(count) <= sizing.LEFT_OUT
    assert count == 1 or missing(count - 1) > sizing.LEFT_OUT


def test_a_slice_of_the_reconciliation_fits_a_statement_at_whatever_rate_the_api_lets_through() -> None:
    """One that did not would be ended by the server, and begun again by the next run, for ever."""
    [limit] = [limit for limit in sizing.limits() if limit.part == "maintenance, reconciliation"]
    assert limit.rate > 2 * TEMPLATE["Parameters"]["ApiRequestsPerSecond"]["MaxValue"]


def test_a_tier_prices_what_falls_into_it() -> None:
    """And not what lies below."""
    tiers = ((10, 3.0), (30, 2.0), (math.inf, 1.0))
    assert [aws.tiered(amount, tiers) for amount in (0, 10, 20, 40)] == [0, 30, 50, 80]


def test_page_images_are_one_a_charge_where_pages_are_many_and_one_a_page_where_charges_are() -> None:
    """The two ends between which the model's own are."""
    assert sizing.images(10, 1_000_000) == pytest.approx(1, abs=0.001)
    assert sizing.images(1_000_000, 10) == pytest.approx(10 / 1_000_000)


def test_clients_get_what_they_ask_for_until_the_processors_are_busy() -> None:
    """Few clients are as fast as one alone; many get what the processors give, and never more."""
    rates = [sizing.throughput(clients, 0.010, 0.001, 0.001, 2) for clients in (1, 2, 1000)]
    assert rates[0] == pytest.approx(1 / 0.011)
    assert rates[1] == pytest.approx(2 / 0.011, rel=0.05)
    assert rates[2] == pytest.approx(2_000, rel=0.001)
    assert rates[2] < 2_000 * 1.000001
