"""What needs a Docker engine: PostgreSQL in a container."""

import contextlib
import gc
import os
import warnings
from collections.abc import Iterator

import docker  # type: ignore[import-untyped]
import pytest
from docker.errors import DockerException  # type: ignore[import-untyped]
from testcontainers.community.postgres import PostgresContainer
from testcontainers.core.config import testcontainers_config

IMAGE = "postgres:18-alpine"


@contextlib.contextmanager
def serve() -> Iterator[str]:
    """A server in a container for as long as the block lasts, as its superuser's URL."""
    require_engine()
    # Its reaper is one more image to pull; leaving the block removes the container.
    testcontainers_config.ryuk_disabled = True
    with PostgresContainer(IMAGE, driver=None) as container:
        yield container.get_connection_url()


def require_engine() -> None:
    """Skips the test where no Docker engine answers, and says so.

    It fails where CI=true, since a suite that skips what it was started for would be green for ever.
    """
    if refusal := _refusal():
        reason = f"This needs a Docker engine, and none answers here: {refusal}"
        if os.environ.get("CI") == "true":
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)


def _refusal() -> str | None:
    """Why no engine can be used, or None."""
    # The client leaves the socket of a refused connection to the garbage collector, which says so in a warning, which
    # would be an error of whatever runs at that moment.
    with warnings.catch_warnings(action="ignore", category=ResourceWarning):
        try:
            with contextlib.closing(docker.from_env()) as client:
                client.ping()
        except DockerException as error:
            reason = str(error)
        else:
            return None
        gc.collect()
    return reason
