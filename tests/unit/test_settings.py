"""Settings: read once, complete or not at all, and silent about what is secret."""

import pytest
from pydantic import ValidationError

from charging import errors
from charging.settings import (
    LOOPBACK,
    REDELIVERY_DAYS,
    DatabaseSettings,
    EndpointsSettings,
    MaintenanceSettings,
    MigrateSettings,
    OperationSettings,
    RelaySettings,
    Settings,
    WebhooksSettings,
    allows_loopback,
)

DATABASE = {
    "DATABASE_HOST": "db.example.com",
    "DATABASE_PORT": "5432",
    "DATABASE_NAME": "charges",
    "DATABASE_USER": "charges",
    "DATABASE_PASSWORD": "tops3cret",
}
MASTER_KEY_ARN = "arn:aws:secretsmanager:eu-central-1:111122223333:secret:WebhookMasterKey-AbCdEf"
COMPLETE: dict[type[Settings], dict[str, str]] = {
    DatabaseSettings: DATABASE,
    OperationSettings: DATABASE | {"IDEMPOTENCY_RETENTION_HOURS": "24", "IN_FLIGHT_WAIT_MS": "0"},
    MigrateSettings: DATABASE | {"DATABASE_ROLES_PASSWORD": ""},
    RelaySettings: DATABASE
    | {
        "TOPIC_ARN": "arn:aws:sns:eu-central-1:111122223333:charges",
        "RELAY_BUDGET_SECONDS": "60",
        "RELAY_POLL_MS": "250",
        "RELAY_MAX_ATTEMPTS": "10",
        "RELAY_PARKED_HEAD": "block",
    },
    MaintenanceSettings: DATABASE | {"OUTBOX_RETENTION_DAYS": "14", "PROCESSED_EVENTS_RETENTION_DAYS": "60"},
    WebhooksSettings: DATABASE
    | {"WEBHOOK_MASTER_KEY_ARN": MASTER_KEY_ARN, "WEBHOOKS_BUDGET_SECONDS": "60", "WEBHOOKS_POLL_MS": "250"},
    EndpointsSettings: DATABASE
    | {"IDEMPOTENCY_RETENTION_HOURS": "24", "IN_FLIGHT_WAIT_MS": "0", "WEBHOOK_MASTER_KEY_ARN": MASTER_KEY_ARN},
}
KINDS = list(COMPLETE)


def read[S: Settings](kind: type[S], environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> S:
    for name in {name for variables in COMPLETE.values() for name in variables}:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return kind.from_environment()


@pytest.mark.parametrize("kind", KINDS)
def test_each_function_reads_its_own_variables_and_no_more(
    kind: type[Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it needs is exactly what it says that it needs, and a stranger among them changes nothing."""
    assert kind.variables() == COMPLETE[kind].keys()
    assert read(kind, COMPLETE[kind], monkeypatch) == read(kind, COMPLETE[kind] | {"HOST": "x"}, monkeypatch)


@pytest.mark.parametrize("kind", KINDS)
def test_every_missing_variable_is_named_at_once(kind: type[Settings], monkeypatch: pytest.MonkeyPatch) -> None:
    """A deployment is repaired in one go, not variable by variable."""
    with pytest.raises(errors.Misconfigured) as refused:
        read(kind, {}, monkeypatch)
    assert all(f"{name}: Field required" in str(refused.value) for name in kind.variables())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DATABASE_HOST", ""),
        ("DATABASE_PORT", "0"),
        ("DATABASE_PORT", "65536"),
        ("DATABASE_PORT", "5432.5"),
        ("DATABASE_PORT", "five"),
        ("DATABASE_NAME", ""),
        ("DATABASE_USER", ""),
        ("IDEMPOTENCY_RETENTION_HOURS", "0"),
        ("IDEMPOTENCY_RETENTION_HOURS", "-24"),
        ("IDEMPOTENCY_RETENTION_HOURS", "1.5"),
        ("IDEMPOTENCY_RETENTION_HOURS", ""),
        ("IN_FLIGHT_WAIT_MS", "-1"),
        ("IN_FLIGHT_WAIT_MS", "4001"),
    ],
)
def test_an_unusable_value_is_refused_by_name(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The function fails at its first use, and says which variable is wrong."""
    with pytest.raises(errors.Misconfigured, match=name):
        read(OperationSettings, COMPLETE[OperationSettings] | {name: value}, monkeypatch)


@pytest.mark.parametrize(
    "arn", ["", "charges", "arn:aws:sqs:eu-central-1:111122223333:charges", "arn:aws:sns:::charges"]
)
def test_a_topic_is_named_by_its_arn(arn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The relay takes the region from it."""
    with pytest.raises(errors.Misconfigured, match="TOPIC_ARN"):
        read(RelaySettings, COMPLETE[RelaySettings] | {"TOPIC_ARN": arn}, monkeypatch)


@pytest.mark.parametrize("days", ["0", "-14", "366", "1.5", ""])
def test_an_event_is_kept_for_a_day_and_not_for_ever(days: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrong is this variable, and no other."""
    with pytest.raises(errors.Misconfigured) as refused:
        read(MaintenanceSettings, COMPLETE[MaintenanceSettings] | {"OUTBOX_RETENTION_DAYS": days}, monkeypatch)
    assert str(refused.value).count("RETENTION_DAYS") == 1


@pytest.mark.parametrize("outbox", [1, 14, 365])
def test_a_seen_event_is_remembered_for_longer_than_it_can_come_again(
    outbox: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator may publish it once more on the outbox's last day; two queues may hold it for 14 days each."""

    def remembering(days: int) -> MaintenanceSettings:
        environment = {"OUTBOX_RETENTION_DAYS": str(outbox), "PROCESSED_EVENTS_RETENTION_DAYS": str(days)}
        return read(MaintenanceSettings, DATABASE | environment, monkeypatch)

    assert REDELIVERY_DAYS == 14 + 14
    least = outbox + REDELIVERY_DAYS
    assert remembering(least).processed_events_retention_days == least
    with pytest.raises(
        errors.Misconfigured, match=r"PROCESSED_EVENTS_RETENTION_DAYS: .*at least OUTBOX_RETENTION_DAYS"
    ):
        remembering(least - 1)


def test_no_secret_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by what is printed of the settings, nor by the error that names a wrong variable."""
    assert "tops3cret" not in repr(read(OperationSettings, COMPLETE[OperationSettings], monkeypatch))
    with pytest.raises(errors.Misconfigured) as refused:
        read(OperationSettings, {**COMPLETE[OperationSettings], "DATABASE_PORT": "tops3cret"}, monkeypatch)
    assert "tops3cret" not in str(refused.value)


def test_settings_are_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing changes them once they are read."""
    settings = read(OperationSettings, COMPLETE[OperationSettings], monkeypatch)
    with pytest.raises(ValidationError):
        settings.retention_hours = 1  # type: ignore[misc]
    monkeypatch.setenv("IDEMPOTENCY_RETENTION_HOURS", "48")
    assert settings.retention_hours == 24


def test_an_empty_password_is_a_choice_and_a_missing_one_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty asks for an IAM token; forgetting the variable does not."""
    empty = read(DatabaseSettings, DATABASE | {"DATABASE_PASSWORD": ""}, monkeypatch)
    assert empty.password.get_secret_value() == ""
    with pytest.raises(errors.Misconfigured, match="DATABASE_PASSWORD"):
        read(DatabaseSettings, {name: DATABASE[name] for name in DATABASE if name != "DATABASE_PASSWORD"}, monkeypatch)


@pytest.mark.parametrize("arn", ["", "key", "arn:aws:sns:eu-central-1:111122223333:secret:key"])
@pytest.mark.parametrize("kind", [WebhooksSettings, EndpointsSettings])
def test_a_master_key_is_named_by_its_arn(kind: type[Settings], arn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its region is taken from it."""
    with pytest.raises(errors.Misconfigured, match="WEBHOOK_MASTER_KEY_ARN"):
        read(kind, COMPLETE[kind] | {"WEBHOOK_MASTER_KEY_ARN": arn}, monkeypatch)


def test_loopback_is_allowed_by_one_word_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not by default; nor is the variable one that any function is said to read."""
    monkeypatch.delenv(LOOPBACK, raising=False)
    assert not allows_loopback()
    for value, allows in (("", False), ("1", False), ("true", False), ("allowed", True)):
        monkeypatch.setenv(LOOPBACK, value)
        assert allows_loopback() == allows
    assert all(LOOPBACK not in kind.variables() for kind in KINDS)
