"""JSON as this service writes it everywhere: without white space, in Unicode, and without nulls."""

import json as _json
from collections.abc import Mapping

# Made once: json.dumps makes a new encoder for every call that asks for anything but its defaults.
json = _json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode

# The same for whatever is compared: equal objects come to one text, in whichever order their members were given.
canonical_json = _json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), sort_keys=True).encode


def given(members: Mapping[str, object]) -> dict[str, object]:
    """Returns the members that have a value: what is not given is left out, never null."""
    return {name: value for name, value in members.items() if value is not None}
