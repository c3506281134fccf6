"""cfn-guard sees the template as AWS would make it, and what it finds comes to light."""

from local import cfn_guard
from tests.packaging.artifacts import TEMPLATE


def test_conditions_are_decided_and_parameters_filled_in() -> None:
    """What a stack has not is not looked at; what it has, with the values that it would have."""
    instance = cfn_guard.resources(TEMPLATE, {})
    assert instance["DatabaseInstance"]["Properties"]["MultiAZ"] is True
    assert instance["DatabaseInstance"]["Properties"]["BackupRetentionPeriod"] == 14
    assert "DatabaseCluster" not in instance
    cluster = cfn_guard.resources(TEMPLATE, {"Database": "aurora", "AlarmTopicArn": ""})
    assert "DatabaseInstance" not in cluster
    assert "AlarmActions" not in cluster["DatabaseCpuAlarm"]["Properties"]


def test_what_a_rule_finds_is_named() -> None:
    """A database that were made unencrypted, by rule and resource."""
    made = cfn_guard.resources(TEMPLATE, {})
    made["DatabaseInstance"]["Properties"]["StorageEncrypted"] = False
    assert ("rds_instance_storage_encrypted_check", "DatabaseInstance") in cfn_guard.findings(made)
