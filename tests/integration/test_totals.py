"""The totals: what was charged and refunded, however its events arrive."""

from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import Any
from uuid import UUID

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from charging import totals
from charging.database import Database
from tests.conftest import Connect
from tests.support import deployment, outbox


@pytest.fixture
def databases(database_url: str) -> Iterator[list[Database]]:
    """Two instances' ways to the database."""
    with deployment.database(database_url) as one, deployment.database(database_url) as two:
        yield [one, two]


@dataclass(frozen=True, slots=True)
class Moved:
    """A charge or a refund, and the id of its event."""

    event_id: UUID
    event_type: str
    principal: str
    currency: str
    amount_cents: int
    at: datetime

    @property
    def event(self) -> totals.MoneyMoved:
        return totals.read(
            outbox.payload(
                self.event_id,
                event_type=self.event_type,
                principal=self.principal,
                currency=self.currency,
                amount_cents=self.amount_cents,
                at=self.at,
            )
        )


@st.composite
def deliveries(draw: st.DrawFn) -> list[list[Moved]]:
    """Charges and refunds whose events come to two instances, some more than once, in any order and to either."""
    moved = draw(
        st.lists(
            st.builds(
                Moved,
                event_id=st.uuids(version=4),
                event_type=st.sampled_from(["ChargeCreated", "ChargeRefunded"]),
                principal=st.sampled_from(["alice", "bob"]),
                currency=st.sampled_from(["USD", "EUR"]),
                amount_cents=st.integers(1, 999_999_999_999),
                at=st.datetimes(datetime(2026, 1, 31), datetime(2026, 2, 1, 23), timezones=st.just(UTC)),  # noqa: DTZ001
            ),
            min_size=1,
            max_size=8,
            unique_by=lambda moved: moved.event_id,
        )
    )
    repeated = moved + draw(st.lists(st.sampled_from(moved), max_size=8))
    shuffled = draw(st.permutations(repeated))
    cut = draw(st.integers(0, len(shuffled)))
    return [shuffled[:cut], shuffled[cut:]]


def expected(moved: set[Moved]) -> dict[tuple[str, str, date], tuple[int, ...]]:
    sums: dict[tuple[str, str, date], tuple[int, ...]] = defaultdict(lambda: (0, 0, 0, 0))
    for one in moved:
        account = one.principal, one.currency, one.at.date()
        step = (1, one.amount_cents, 0, 0) if one.event_type == "ChargeCreated" else (0, 0, 1, one.amount_cents)
        sums[account] = tuple(map(sum, zip(sums[account], step, strict=True)))
    return sums


def kept(connection: outbox.Connection) -> dict[tuple[str, str, date], tuple[int, ...]]:
    rows = connection.execute(
        "SELECT principal, currency, day, charges, amount_cents, refunds, refunded_cents FROM charge_totals"
    ).fetchall()
    return {row[:3]: row[3:] for row in rows}


@given(deliveries())
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_totals_do_not_depend_on_how_events_arrive(
    databases: list[Database], connect: Connect, delivered: list[list[Moved]]
) -> None:
    """Any order, any repetition, on two instances at once: each charge and each refund is in its total once."""
    with connect() as connection:
        connection.execute("DELETE FROM processed_events")
        connection.execute("DELETE FROM charge_totals")

        def consume(database: Database, moved: list[Moved]) -> int:
            return sum(totals.apply(database, one.event) for one in moved)

        with ThreadPoolExecutor(2) as instances:
            firsts: list[Any] = list(instances.map(consume, databases, delivered))
        moved = {one for part in delivered for one in part}
        assert sum(firsts) == len(moved)
        assert kept(connection) == expected(moved)
