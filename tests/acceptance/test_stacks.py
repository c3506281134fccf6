"""Stacks of the template: they come, change and go, in each combination of parameters that the emulator can take."""

import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

import boto3
import pytest
from psycopg import conninfo

from local import build, deploy, emulator
from local.emulator import ACCESS_KEY_ID, REGION, SECRET_ACCESS_KEY, Emulator

# One worker runs them all, on one emulator.
pytestmark = pytest.mark.xdist_group("stacks")

POOL = f"arn:aws:cognito-idp:{REGION}:111122223333:userpool/{REGION}_a1b2c3d4e"
CERTIFICATE = f"arn:aws:acm:{REGION}:111122223333:certificate/8e03978e-40d5-43e8-bc93-6894a57f9324"


class Cloud:
    """An emulated account, and the template that was built for it."""

    def __init__(self, aws: Emulator, database_url: str) -> None:
        self.url = aws.url
        self.session = boto3.Session(ACCESS_KEY_ID, SECRET_ACCESS_KEY, region_name=REGION)
        parts = conninfo.conninfo_to_dict(database_url)
        self._always = {
            "Architecture": build.architecture(),
            "Network": "none",
            "Database": "existing",
            "GradualDeployment": "false",
            "Emulated": "true",
            "DatabaseHost": str(parts["host"]),
            "DatabasePort": str(parts["port"]),
            "DatabaseName": str(parts["dbname"]),
            "DatabaseUser": str(parts["user"]),
            "DatabaseSecretArn": deploy.keep_passwords(
                self.session, self.url, functions="of the functions", owner=str(parts.get("password") or "trusted")
            ),
            # Their schedules would start relays and monitors beside the tests.
            "RelayBudgetSeconds": "0",
        }

    def client(self, service: str) -> Any:
        """A client of one of its services."""
        return self.session.client(service, endpoint_url=self.url)  # type: ignore[call-overload]

    def create(self, name: str, parameters: Mapping[str, str]) -> Mapping[str, str]:
        """Makes a stack and returns its outputs."""
        values = self._always | dict(parameters)
        return deploy.create_stack(self.session, self.url, name, deploy.upload(self.session, self.url, values), values)

    def update(self, name: str, parameters: Mapping[str, str]) -> str:
        """Changes a stack in place; what became of it."""
        values = self._always | dict(parameters)
        self.client("cloudformation").update_stack(
            StackName=name,
            TemplateURL=deploy.upload(self.session, self.url, values),
            Parameters=[{"ParameterKey": key, "ParameterValue": value} for key, value in values.items()],
            Capabilities=["CAPABILITY_IAM", "CAPABILITY_AUTO_EXPAND"],
        )
        return self.settled(name)

    def delete(self, name: str) -> None:
        """Deletes a stack, and returns once it is gone."""
        cloudformation = self.client("cloudformation")
        stack_id = cloudformation.describe_stacks(StackName=name)["Stacks"][0]["StackId"]
        cloudformation.delete_stack(StackName=name)
        assert self.settled(stack_id) == "DELETE_COMPLETE"

    def settled(self, name: str) -> str:
        """What a stack has come to once nothing is in progress."""
        describe = self.client("cloudformation").describe_stacks

        deadline = time.monotonic() + deploy.DEPLOY_SECONDS
        while (status := str(describe(StackName=name)["Stacks"][0]["StackStatus"])).endswith("_PROGRESS"):
            assert time.monotonic() < deadline
        return status

    def resources(self, name: str) -> dict[str, str]:
        """The names in the account of what a stack has, by their names in the template."""
        found = self.client("cloudformation").describe_stack_resources(StackName=name)["StackResources"]
        return {one["LogicalResourceId"]: one["PhysicalResourceId"] for one in found}


@pytest.fixture(scope="module")
def aws(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulator]:
    """An emulator without a stack."""
    if not build.is_current():
        build.build()
    folder = tmp_path_factory.mktemp("stacks")
    descriptor = os.open(folder / "lock", os.O_CREAT | os.O_RDWR)
    try:
        with emulator.serve(folder / "emulator", port=emulator.available(0), lock=descriptor) as running:
            yield running
    finally:
        os.close(descriptor)


@pytest.fixture
def cloud(aws: Emulator, empty_database_url: str) -> Cloud:
    """The emulator, and a database without a schema."""
    return Cloud(aws, empty_database_url)


COMBINATIONS: dict[str, dict[str, str]] = {
    "defaults": {},
    "ordered": {"EventOrder": "per-aggregate", "ParkedEvent": "skip"},
    "tokens": {"UserPoolArn": POOL, "UserPoolScopes": "charges/write,charges/read"},
    "domain": {
        "DomainName": "charges.example.com",
        "DomainCertificateArn": CERTIFICATE,
        "DomainHostedZoneId": "Z0123456789ABCDEFGHIJ",
    },
    # Of a network of the stack's own the emulator knows no NAT gateway and no rule of a security group by itself.
    "network": {
        "Network": "existing",
        "VpcId": "vpc-0123456789abcdef0",
        "VpcSubnetIds": "subnet-0123456789abcdef0,subnet-0123456789abcdef1",
    },
    "quiet": {"ApiAccessLogs": "none", "AlarmTopicArn": f"arn:aws:sns:{REGION}:111122223333:operations"},
    "tuned": {
        "SnapStart": "true",
        "ReservedConcurrency": "20",
        "LogDays": "365",
        "ApiBurst": "20",
        "ApiRequestsPerSecond": "50",
        "IdempotencyRetentionHours": "48",
        "MetricsNamespace": "ChargesOfTests",
        "RelayMemoryMb": "1769",
        "WebhooksMemoryMb": "256",
        "WebhooksBudgetSeconds": "0",
        "OutboxRetentionDays": "7",
        "ProcessedEventsRetentionDays": "35",
    },
}


@pytest.mark.parametrize("parameters", COMBINATIONS.values(), ids=COMBINATIONS)
def test_a_stack_comes_changes_and_goes(cloud: Cloud, parameters: dict[str, str]) -> None:
    """Made with these parameters, changed back to the defaults, and deleted, without anything left in between."""
    if "DomainHostedZoneId" in parameters:
        zone = cloud.client("route53").create_hosted_zone(Name="example.com", CallerReference="once")["HostedZone"][
            "Id"
        ]
        parameters = parameters | {"DomainHostedZoneId": zone.rpartition("/")[2]}
    outputs = cloud.create("one", parameters)
    assert outputs["ApiUrl"] == (
        f"https://{parameters['DomainName']}" if "DomainName" in parameters else outputs["ApiUrl"]
    )
    assert cloud.update("one", {"InFlightWaitMs": "100"}) == "UPDATE_COMPLETE"
    cloud.delete("one")


def test_a_changed_parameter_reaches_the_version_that_is_live(cloud: Cloud) -> None:
    """The alias goes to a version that has it, as well as everything from before."""
    outputs = cloud.create("one", {"InFlightWaitMs": "0"})
    assert cloud.update("one", {"InFlightWaitMs": "100"}) == "UPDATE_COMPLETE"
    live = cloud.client("lambda").get_function_configuration(FunctionName=outputs["ChargesFunction"])
    assert live["Version"] != "$LATEST"
    assert live["Environment"]["Variables"]["IN_FLIGHT_WAIT_MS"] == "100"
    cloud.delete("one")


def test_two_stacks_stand_side_by_side(cloud: Cloud) -> None:
    """Nothing of theirs has the same name; and one goes without the other."""
    cloud.create("one", {})
    cloud.create("two", {"MetricsNamespace": "ChargesOfTests"})
    one, two = cloud.resources("one"), cloud.resources("two")
    # One is the account's own, a stage's name is within its API, and a migration is nothing of the account's at all.
    shared = {name for name in one.keys() & two.keys() if one[name] == two[name]}
    assert shared <= {"ApiAccount", "ApiprodStage", "Migration"}
    # Each deployment of an API has a name of its own, in the template too.
    assert {name for name in one.keys() ^ two.keys() if not name.startswith("ApiDeployment")} == set()
    cloud.delete("one")
    assert cloud.settled("two") == "CREATE_COMPLETE"
    cloud.delete("two")


def test_a_release_without_its_schema_leaves_the_one_before(cloud: Cloud) -> None:
    """The stack rolls back, and what is live is what was."""
    outputs = cloud.create("one", {})
    before = cloud.client("lambda").get_function_configuration(FunctionName=outputs["ChargesFunction"])
    # A release whose migrations find a database that does not answer.
    status = cloud.update("one", {"DatabasePort": "1200", "InFlightWaitMs": "100"})
    assert status == "UPDATE_ROLLBACK_COMPLETE"
    after = cloud.client("lambda").get_function_configuration(FunctionName=outputs["ChargesFunction"])
    assert after["Environment"] == before["Environment"]
    cloud.delete("one")
