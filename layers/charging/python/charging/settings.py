"""What a function is told by its environment: read once, at first use, and frozen."""

import os
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, ValidationInfo, field_validator

from charging import errors

# For `allows_loopback`. In no class of settings, and so in no template.
LOOPBACK = "LOCAL_WEBHOOKS"

_SECRET_ARN = r"^arn:[a-z-]+:secretsmanager:[a-z0-9-]+:[0-9]{12}:secret:.+$"  # noqa: S105 - where one is


class Settings(BaseModel):
    """The base of every function's settings: a field's alias is the name of its variable."""

    # Built at first use, since a function uses one of these classes and imports all of them.
    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=False, defer_build=True)

    @classmethod
    def variables(cls) -> frozenset[str]:
        """The names of all the variables that this class reads."""
        return frozenset(field.alias for field in cls.model_fields.values() if field.alias)

    @classmethod
    def from_environment(cls) -> Self:
        """Reads the process's environment.

        Raises Misconfigured, naming every variable that is missing or unusable, never their values.
        """
        given = {name: os.environ[name] for name in cls.variables() if name in os.environ}
        try:
            return cls.model_validate(given)
        except ValidationError as invalid:
            faults = "; ".join(f"{fault['loc'][0]}: {fault['msg']}" for fault in invalid.errors(include_input=False))
            raise errors.Misconfigured(f"The function's environment is not usable. {faults}") from None


class DatabaseSettings(Settings):
    """Where the database is and who is asking. An empty password stands for an RDS IAM token, and so for TLS."""

    host: str = Field(alias="DATABASE_HOST", min_length=1)
    port: int = Field(alias="DATABASE_PORT", ge=1, le=65535)
    name: str = Field(alias="DATABASE_NAME", min_length=1)
    user: str = Field(alias="DATABASE_USER", min_length=1)
    password: SecretStr = Field(alias="DATABASE_PASSWORD")


class OperationSettings(DatabaseSettings):
    """A function whose operations are performed under idempotency keys."""

    retention_hours: int = Field(alias="IDEMPOTENCY_RETENTION_HOURS", ge=1)
    # Below the server's statement_timeout, which would otherwise end the wait with another error.
    in_flight_wait_ms: int = Field(alias="IN_FLIGHT_WAIT_MS", ge=0, le=4000)


class MigrateSettings(DatabaseSettings):
    """The migrate function, which signs in as the database's owner."""

    # What the functions' roles sign in with; empty where they do with IAM tokens.
    roles_password: SecretStr = Field(alias="DATABASE_ROLES_PASSWORD")


class RelaySettings(DatabaseSettings):
    """The relay function."""

    topic_arn: str = Field(alias="TOPIC_ARN", pattern=r"^arn:[a-z-]+:sns:[a-z0-9-]+:[0-9]{12}:[A-Za-z0-9_.-]+$")
    budget_seconds: int = Field(alias="RELAY_BUDGET_SECONDS", ge=0)
    poll_ms: int = Field(alias="RELAY_POLL_MS", ge=10)
    max_attempts: int = Field(alias="RELAY_MAX_ATTEMPTS", ge=1)
    # With a FIFO topic alone: what becomes of an aggregate's later events while one of them is parked.
    parked_head: Literal["block", "skip"] = Field(alias="RELAY_PARKED_HEAD")


# How long after its publication an event can still be delivered: 14 days in a queue, the longest that SQS keeps a
# message, and another 14 in a dead-letter queue, after which it may be sent back once more.
REDELIVERY_DAYS = 28


class MaintenanceSettings(DatabaseSettings):
    """The maintenance function."""

    outbox_retention_days: int = Field(alias="OUTBOX_RETENTION_DAYS", ge=1, le=365)
    processed_events_retention_days: int = Field(alias="PROCESSED_EVENTS_RETENTION_DAYS", le=730)

    @field_validator("processed_events_retention_days")
    @classmethod
    def outlasts_the_last_redelivery(cls, days: int, others: ValidationInfo) -> int:
        """An operator can publish an event again for as long as the outbox keeps it, and it is delivered after that.

        An id that is forgotten before then would let the event take effect twice.
        """
        if days < others.data.get("outbox_retention_days", 0) + REDELIVERY_DAYS:
            raise ValueError(f"must be at least OUTBOX_RETENTION_DAYS and {REDELIVERY_DAYS} days more")
        return days


class WebhooksSettings(DatabaseSettings):
    """The webhooks function."""

    master_key_arn: str = Field(alias="WEBHOOK_MASTER_KEY_ARN", pattern=_SECRET_ARN)
    budget_seconds: int = Field(alias="WEBHOOKS_BUDGET_SECONDS", ge=0)
    poll_ms: int = Field(alias="WEBHOOKS_POLL_MS", ge=10)


class EndpointsSettings(OperationSettings):
    """The endpoints function."""

    master_key_arn: str = Field(alias="WEBHOOK_MASTER_KEY_ARN", pattern=_SECRET_ARN)


def allows_loopback() -> bool:
    """Tells whether webhooks may go to receivers on this very machine, and over plain http.

    That is for development: the embedded stack gives its functions the variable after it has deployed them.
    """
    return os.environ.get(LOOPBACK) == "allowed"
