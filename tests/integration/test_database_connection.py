"""What a connection is like: what a proxy bears of it, and how it notices that nobody is at its other end."""

import os
import socket
import sys
from typing import Any

import pytest
from psycopg.rows import scalar_row

from charging import database
from charging.database import Database
from charging.settings import DatabaseSettings
from tests.support.invocation import database_variables

PROXY = "charges.proxy-a1b2c3d4e5f6.eu-central-1.rds.amazonaws.com"
INSTANCE = "charges.a1b2c3d4e5f6.eu-central-1.rds.amazonaws.com"

# Until a caller is told by API Gateway that nobody answers.
PATIENCE_SECONDS = 29


@pytest.mark.parametrize(("host", "prepares"), [(PROXY, False), (INSTANCE, True)], ids=["proxy", "instance"])
def test_behind_a_proxy_nothing_is_prepared(
    host: str, prepares: bool, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RDS Proxy keeps a connection for whoever has prepared something, and then there is none to share."""
    variables = database_variables(database_url)
    look_up = socket.getaddrinfo

    def looked_up(name: Any, *arguments: Any, **options: Any) -> Any:
        return look_up(variables["DATABASE_HOST"] if name == host else name, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", looked_up)
    connected = Database(DatabaseSettings.model_validate({**variables, "DATABASE_HOST": host}))
    for _ in range(10):
        connected.fetch(scalar_row, b"SELECT %(number)s::int", {"number": 1})
    [prepared] = connected.fetch(scalar_row, b"SELECT count(*) FROM pg_prepared_statements", {})
    connected.close()
    assert (prepared > 0) == prepares


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the options of a socket of Linux's")
def test_a_peer_that_has_vanished_is_noticed_within_a_callers_patience(database_url: str) -> None:
    """Whether it vanishes while nothing is said or while something is: the kernel's own limits are hours."""
    settings = DatabaseSettings.model_validate(database_variables(database_url))
    with database.connect(settings) as connection, socket.socket(fileno=os.dup(connection.fileno())) as end:
        assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
        idle, interval, count, unacknowledged = (end.getsockopt(socket.IPPROTO_TCP, option) for option in options)
    assert idle + interval * count < PATIENCE_SECONDS
    assert 0 < unacknowledged / 1000 < PATIENCE_SECONDS
