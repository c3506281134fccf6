"""CloudFormation's custom resources: how a function that a stack waits for tells it the outcome.

Source: https://docs.aws.amazon.com/AWSCloudFormation/latest/UserGuide/crpg-ref.html
"""

import json
import urllib.request
from collections.abc import Mapping
from typing import Any

# What CloudFormation shows of a reason.
_REASON_CHARACTERS = 1000
_ANSWER_SECONDS = 30


def is_request(event: Mapping[str, Any]) -> bool:
    """Whether it is CloudFormation that asks, and waits for an answer."""
    return "RequestType" in event and "ResponseURL" in event


def answer(event: Mapping[str, Any], physical_id: str, *, failure: str | None = None) -> None:
    """Tells the stack that the resource is as it asked, or why it is not.

    Raises OSError when the answer could not be sent: the stack then waits until its own time is over.
    """
    # The same name for every version of the resource: another one would have CloudFormation delete the one before.
    document = {
        "Status": "SUCCESS" if failure is None else "FAILED",
        "Reason": (failure or "")[:_REASON_CHARACTERS],
        "PhysicalResourceId": physical_id,
        **{name: event[name] for name in ("StackId", "RequestId", "LogicalResourceId")},
    }
    # The URL is signed for a request without a content type.
    request = urllib.request.Request(  # noqa: S310 - CloudFormation's own
        event["ResponseURL"], data=json.dumps(document).encode(), method="PUT", headers={"Content-Type": ""}
    )
    with urllib.request.urlopen(request, timeout=_ANSWER_SECONDS):  # noqa: S310
        pass
