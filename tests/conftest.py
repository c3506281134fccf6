"""Fixtures that several kinds of tests use: a fresh database, ways to it, and the function that charges."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from hypothesis import settings

from tests.support.database import Databases, databases
from tests.support.invocation import CHARGES, Instance
from tests.support.wire import Wire

# A machine that is busy with something else is no finding; what a failure was is.
settings.register_profile("charging", deadline=None, print_blob=True)
settings.load_profile("charging")

type Connection = psycopg.Connection[tuple[Any, ...]]
type Connect = Callable[[], Connection]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let pytest-xdist keep the tests of a group on one worker.

    Its release 3.8 writes the group behind a test's id, in a place where pytest 9.2 does not look any more
    (github.com/pytest-dev/pytest-xdist/issues/1386), and then every worker makes what one was to make for all.
    """
    for item in items:
        if grouped := vars(item).get("_nodeid"):
            item._id = type(item.id).parse(grouped)  # noqa: SLF001 - there is no other way to give it


@pytest.fixture(scope="session")
def database_server() -> Iterator[Databases]:
    with databases() as server:
        yield server


@pytest.fixture
def database_url(database_server: Databases) -> Iterator[str]:
    """A fresh database with the schema in it, for this test alone."""
    with database_server.migrated() as url:
        yield url


@pytest.fixture
def empty_database_url(database_server: Databases) -> Iterator[str]:
    """A fresh database that no migration has touched, for this test alone."""
    with database_server.empty() as url:
        yield url


@pytest.fixture
def connect(database_url: str) -> Iterator[Connect]:
    """Opens connections to this test's database, in autocommit, and closes them after the test."""
    with contextlib.ExitStack() as opened:
        yield lambda: opened.enter_context(psycopg.connect(database_url, autocommit=True))


@pytest.fixture
def database(connect: Connect) -> Connection:
    """A connection to this test's database."""
    return connect()


@pytest.fixture
def wire(database_url: str) -> Iterator[Wire]:
    """The way to the database, which can be spoilt."""
    with Wire(database_url) as proxy:
        yield proxy


@pytest.fixture
def api(database_url: str) -> Iterator[Instance]:
    """An instance of the function that charges."""
    instance = Instance("charges", database_url, CHARGES)
    yield instance
    instance.close()
