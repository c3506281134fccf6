"""When a command hears that it is to end."""

import signal
from collections.abc import Iterator

import pytest

from local import stopping
from local.stopping import Stopped


@pytest.fixture(autouse=True)
def listening() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in stopping.SIGNALS}
    stopping.listen()
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", stopping.SIGNALS)
def test_a_signal_is_heard_at_once_and_once(number: signal.Signals) -> None:
    """A second one would only tear what the first has begun."""
    with pytest.raises(Stopped):
        signal.raise_signal(number)
    for later in stopping.SIGNALS:
        signal.raise_signal(later)


@pytest.mark.parametrize("number", stopping.SIGNALS)
def test_a_deferred_signal_is_heard_after_the_block(number: signal.Signals) -> None:
    """Nothing in the block is left half-way."""
    done = []

    def work() -> None:
        with stopping.deferred():
            signal.raise_signal(number)
            done.append("all of it")

    with pytest.raises(Stopped):
        work()
    assert done == ["all of it"]


def test_a_deferred_signal_is_heard_where_the_block_failed() -> None:
    """Who asked for the end is not told of a failure instead."""

    def fail() -> None:
        with stopping.deferred():
            signal.raise_signal(signal.SIGTERM)
            raise ValueError

    with pytest.raises(Stopped):
        fail()


def test_after_the_block_signals_are_heard_as_before() -> None:
    """A block in which nothing came changes nothing."""
    with stopping.deferred():
        pass
    with pytest.raises(Stopped):
        signal.raise_signal(signal.SIGINT)
