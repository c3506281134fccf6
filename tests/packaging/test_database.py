"""The databases that the template can make: encrypted, backed up, hard to lose, and alike."""

from typing import Any

import pytest

from tests.packaging.artifacts import TEMPLATE

RESOURCES: dict[str, Any] = TEMPLATE["Resources"]
# https://docs.aws.amazon.com/AmazonRDS/latest/UserGuide/CHAP_Storage.html: gp3 of RDS for PostgreSQL.
RDS_GB = 65_536
STORES = ["DatabaseInstance", "DatabaseCluster"]


@pytest.mark.parametrize("name", STORES)
def test_a_database_is_not_lost_with_its_stack(name: str) -> None:
    """It refuses to be deleted, leaves a snapshot when it is deleted or replaced, and can be restored to any second."""
    database = RESOURCES[name]
    assert database["DeletionPolicy"] == database["UpdateReplacePolicy"] == "Snapshot"
    assert database["Properties"]["DeletionProtection"] == {"Ref": "DatabaseDeletionProtection"}
    assert TEMPLATE["Parameters"]["DatabaseDeletionProtection"]["Default"] == "true"
    assert TEMPLATE["Parameters"]["DatabaseBackupDays"]["MinValue"] >= 1


@pytest.mark.parametrize("name", STORES)
def test_a_database_keeps_its_secrets(name: str) -> None:
    """Encrypted on disk, and entered with IAM by everybody: not even its owner has a password."""
    properties = RESOURCES[name]["Properties"]
    assert properties["StorageEncrypted"] is True
    assert properties["EnableIAMDatabaseAuthentication"] is True
    # With a password it would be locked out by what tests/integration/test_roles.py shows of an owner on RDS.
    assert properties["MasterUserAuthenticationType"] == "iam-db-auth"
    assert not {"MasterUserPassword", "ManageMasterUserPassword"} & properties.keys()


def test_a_database_is_as_its_parameters_have_it() -> None:
    """Its standby, and for how long it can be restored to any second."""
    for name in STORES:
        assert RESOURCES[name]["Properties"]["BackupRetentionPeriod"] == {"Ref": "DatabaseBackupDays"}
    assert RESOURCES["DatabaseInstance"]["Properties"]["MultiAZ"] == {"Ref": "DatabaseMultiAz"}
    assert RESOURCES["ClusterReader"]["Condition"] == "HasReader"
    assert TEMPLATE["Parameters"]["DatabaseMultiAz"]["Default"] == "true"


def test_a_database_tells_what_it_does() -> None:
    """Its log, who is refused, what its statements wait for, and the machine's load."""
    for name in STORES:
        assert {*RESOURCES[name]["Properties"]["EnableCloudwatchLogsExports"]} >= {"postgresql", "iam-db-auth-error"}
    for one in RESOURCES.values():
        if one["Type"] == "AWS::RDS::DBInstance":
            assert one["Properties"]["EnablePerformanceInsights"] is True
            assert one["Properties"]["MonitoringInterval"] > 0


def test_a_proxy_speaks_tls_and_has_no_password() -> None:
    """With IAM on both of its sides."""
    proxy = RESOURCES["DatabaseProxyServer"]["Properties"]
    assert (proxy["RequireTLS"], proxy["DefaultAuthScheme"]) == (True, "IAM_AUTH")
    assert "Auth" not in proxy


def test_a_disk_has_room_to_grow_into() -> None:
    """RDS takes no bound for its growth that is less than a tenth above the size."""
    growth = RESOURCES["DatabaseInstance"]["Properties"]["MaxAllocatedStorage"]
    assert TEMPLATE["Parameters"]["DatabaseStorageGb"]["MaxValue"] * 1.1 <= growth <= RDS_GB


def test_both_engines_have_the_same_parameters() -> None:
    """TLS or nothing, and no values of a statement in a log, whichever is chosen."""
    instance = RESOURCES["InstanceParameters"]["Properties"]["Parameters"]
    assert instance == RESOURCES["ClusterParameters"]["Properties"]["Parameters"]
    assert instance["rds.force_ssl"] == "1"
    assert instance["log_parameter_max_length"] == instance["log_parameter_max_length_on_error"] == "0"


def test_the_roots_are_those_of_the_authority_that_is_named() -> None:
    """charging.certificates has the roots of the first generation's authorities."""
    instances = [one["Properties"] for one in RESOURCES.values() if one["Type"] == "AWS::RDS::DBInstance"]
    assert {one["CACertificateIdentifier"] for one in instances} == {"rds-ca-rsa2048-g1"}
