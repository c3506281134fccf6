"""Identifiers that sort by the time they were made."""

import os
import time
from datetime import datetime
from uuid import UUID


def time_ordered_uuid() -> UUID:
    """Returns a new version 7 UUID (RFC 9562, §5.7): 48 bits of Unix milliseconds, then 74 random bits.

    New rows then land side by side in their primary key's index. Random ones would touch a page each, and
    after every checkpoint the first touch writes that whole page to the WAL.
    """
    milliseconds = time.time_ns() // 1_000_000
    random = int.from_bytes(os.urandom(10))
    return UUID(
        int=(milliseconds & 0xFFFF_FFFF_FFFF) << 80
        | 0x7 << 76
        | (random >> 62 & 0xFFF) << 64
        | 0b10 << 62
        | random & 0x3FFF_FFFF_FFFF_FFFF
    )


def earliest_uuid(at: datetime) -> UUID:
    """Returns what no `time_ordered_uuid` made at that time or later is below."""
    return UUID(int=max(0, int(at.timestamp() * 1000)) << 80)
