"""The topic, the queues and what is between them: nothing that fails is dropped, and nobody else's messages come in."""

from typing import Any, get_args

import pytest

from charging.totals import MoneyMoved
from tests.packaging.artifacts import FUNCTIONS, TEMPLATE

RESOURCES: dict[str, Any] = TEMPLATE["Resources"]
QUEUES = {name: one["Properties"] for name, one in RESOURCES.items() if one["Type"] == "AWS::SQS::Queue"}
# An event's way, to its end in one queue or another.
ON_THE_WAY = ("SubscriberQueue", "DeadLetterQueue", "UndeliveredQueue")
DAYS = 24 * 3600


def arn(name: str) -> dict[str, list[str]]:
    return {"Fn::GetAtt": [name, "Arn"]}


def test_what_a_batch_could_not_apply_comes_back() -> None:
    """The function names the messages that failed. Lambda would otherwise not look, and delete them with the others."""
    [source] = FUNCTIONS["SubscriberFunction"]["Events"].values()
    assert source["Properties"]["Queue"] == arn("SubscriberQueue")
    assert source["Properties"]["FunctionResponseTypes"] == ["ReportBatchItemFailures"]


def test_the_subscriber_is_sent_what_it_counts() -> None:
    """Each type of event that it knows and no other, which would end among the dead letters; and as it was written."""
    subscription = RESOURCES["Subscription"]["Properties"]
    assert {*subscription["FilterPolicy"]["eventType"]} == {*get_args(MoneyMoved.model_fields["type"].annotation)}
    assert subscription["RawMessageDelivery"] is True


def test_a_message_that_fails_is_tried_again_and_then_kept() -> None:
    """A database that is away for a minute costs no message; one that cannot be delivered or applied is not lost."""
    redrive = QUEUES["SubscriberQueue"]["RedrivePolicy"]
    assert redrive["deadLetterTargetArn"] == arn("DeadLetterQueue")
    assert redrive["maxReceiveCount"] >= 3
    undelivered = RESOURCES["Subscription"]["Properties"]["RedrivePolicy"]
    assert undelivered == {"deadLetterTargetArn": arn("UndeliveredQueue")}
    for name in ("DeadLetterQueue", "UndeliveredQueue"):
        assert QUEUES[name]["MessageRetentionPeriod"] == 14 * DAYS
        assert RESOURCES[name]["DeletionPolicy"] == RESOURCES[name]["UpdateReplacePolicy"] == "Retain"


@pytest.mark.parametrize("name", ON_THE_WAY)
def test_order_is_kept_to_the_end(name: str) -> None:
    """A FIFO topic delivers to FIFO queues alone, and a FIFO queue has a FIFO queue for its dead letters."""
    in_order = {"Fn::If": ["IsOrdered", True, {"Ref": "AWS::NoValue"}]}
    assert RESOURCES["Topic"]["Properties"]["FifoTopic"] == QUEUES[name]["FifoQueue"] == in_order


def test_queues_take_what_this_topic_sends_and_nothing_in_the_open() -> None:
    """Whoever has a topic of their own cannot send charges that were never made."""
    allow, deny = RESOURCES["QueuePolicy"]["Properties"]["PolicyDocument"]["Statement"]
    reached = [arn("SubscriberQueue"), arn("UndeliveredQueue")]
    assert (allow["Effect"], allow["Principal"]) == ("Allow", {"Service": "sns.amazonaws.com"})
    assert (allow["Action"], allow["Resource"]) == ("sqs:SendMessage", reached)
    assert allow["Condition"] == {"ArnEquals": {"aws:SourceArn": {"Ref": "Topic"}}}
    assert (deny["Effect"], deny["Principal"], deny["Action"], deny["Resource"]) == ("Deny", "*", "sqs:*", reached)
    assert deny["Condition"] == {"Bool": {"aws:SecureTransport": False}}
