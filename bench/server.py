"""The PostgreSQL that benchmarks run on: the embedded one with its default settings, durability included, or the one
that DATABASE_URL names."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import psycopg

from local import lock, postgres
from local.errors import StackError
from tests.support.database import Databases

RESULTS = Path(__file__).parent / "results"
# Beside the results, since a temporary folder may lie in memory, where a sync costs nothing. Gigabytes, for a while.
FOLDER = RESULTS / "postgres"


@contextlib.contextmanager
def databases() -> Iterator[Databases]:
    """A server for as long as the block lasts, and what makes databases on it."""
    with contextlib.ExitStack() as stack:
        url = os.environ.get("DATABASE_URL")
        if url is None:
            RESULTS.mkdir(parents=True, exist_ok=True)
            stack.enter_context(_alone())
            shutil.rmtree(FOLDER, ignore_errors=True)  # what a run left that was killed
            stack.callback(shutil.rmtree, FOLDER, ignore_errors=True)
            url = stack.enter_context(postgres.serve(FOLDER)).url
        made = Databases(stack.enter_context(psycopg.connect(url, autocommit=True)), url)
        stack.callback(made.close)
        yield made


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(lock.held(RESULTS / "lock"))
        except lock.InUse as error:
            raise StackError(
                f"Process {error.holder or 'unknown'} runs benchmarks here already.",
                means="Each would measure the other.",
                remedy="wait until it has ended, or stop it.",
            ) from error
        yield
