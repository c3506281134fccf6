"""Identifiers: UUIDs of version 7, in the order in which they were made."""

import time
from uuid import RFC_4122

from charging.identifiers import time_ordered_uuid


def test_an_identifier_is_a_version_7_uuid() -> None:
    """Version and variant are those of RFC 9562, for every random draw."""
    made = [time_ordered_uuid() for _ in range(2_000)]
    assert {(one.version, one.variant) for one in made} == {(7, RFC_4122)}


def test_an_identifier_carries_the_millisecond_it_was_made_in() -> None:
    """Its first 48 bits are Unix time in milliseconds."""
    before = time.time_ns() // 1_000_000
    stamp = time_ordered_uuid().int >> 80
    assert before <= stamp <= time.time_ns() // 1_000_000


def test_identifiers_sort_by_their_millisecond() -> None:
    """As numbers, as text and as bytes, the later one is greater."""
    made = [time_ordered_uuid() for _ in range(2_000)]
    stamps = [one.int >> 80 for one in made]
    assert stamps == sorted(stamps)
    assert [str(one)[:13] for one in made] == sorted(str(one)[:13] for one in made)


def test_identifiers_of_one_millisecond_differ() -> None:
    """74 bits are random, and every one of them varies."""
    made = [time_ordered_uuid().int for _ in range(2_000)]
    assert len(set(made)) == len(made)
    varying = 0
    for one in made:
        varying |= one ^ made[0]
    random_bits = (0xFFF << 64) | (2**62 - 1)
    assert varying & random_bits == random_bits
