"""The port of the emulated AWS."""

import socket
from unittest import mock

import pytest

from local import emulator
from local.errors import StackError


def test_a_free_port_is_found() -> None:
    """And it is one that can be asked for."""
    assert emulator.available(emulator.available(0)) > 0


def test_a_taken_port_is_told_from_a_forbidden_one() -> None:
    """Another program is blamed for the first alone."""
    with socket.socket() as other:
        other.bind((emulator.HOST, 0))
        other.listen()
        with pytest.raises(StackError, match="another program does"):
            emulator.available(other.getsockname()[1])
    # Whether an account may listen on a low port is the system's to say.
    with mock.patch.object(socket.socket, "bind", side_effect=PermissionError(13, "Permission denied")):
        with pytest.raises(StackError, match="choose a higher port") as forbidden:
            emulator.available(80)
        assert "another program" not in str(forbidden.value)
