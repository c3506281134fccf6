"""Who may speak to whom: the database is reached by the functions alone, and only those that must get out do."""

from typing import Any

import pytest

from tests.packaging.artifacts import FUNCTIONS, TEMPLATE

RESOURCES: dict[str, Any] = TEMPLATE["Resources"]
ANYWHERE = "0.0.0.0/0"


def of_type(kind: str) -> dict[str, dict[str, Any]]:
    return {name: resource["Properties"] for name, resource in RESOURCES.items() if resource["Type"] == kind}


def groups(function: str) -> set[str]:
    """The names of the security groups that a function can be in."""
    config = FUNCTIONS[function].get("VpcConfig", TEMPLATE["Globals"]["Function"]["VpcConfig"])
    condition, inside, outside = config["Fn::If"]
    assert (condition, outside) == ("IsInVpc", {"Ref": "AWS::NoValue"})
    return {name for group in inside["SecurityGroupIds"] for name in refs(group)}


def refs(value: Any) -> set[str]:
    """Every resource and parameter that a value can come down to."""
    if isinstance(value, dict):
        if "Ref" in value:
            return {value["Ref"]}
        return {name for one in value.values() for name in refs(one)}
    if isinstance(value, list):
        return {name for one in value for name in refs(one)}
    return set()


def test_every_way_in_names_a_group() -> None:
    """No rule admits an address: who is let in is in a group, and the group says why."""
    assert not any("SecurityGroupIngress" in group for group in of_type("AWS::EC2::SecurityGroup").values())
    for rule in of_type("AWS::EC2::SecurityGroupIngress").values():
        assert "SourceSecurityGroupId" in rule
        assert not rule.keys() & {"CidrIp", "CidrIpv6", "SourcePrefixListId"}


def test_every_group_says_where_it_may_go() -> None:
    """A group without a rule out would get EC2's own, which allows everything."""
    for name, group in of_type("AWS::EC2::SecurityGroup").items():
        assert group["SecurityGroupEgress"], name


def test_the_database_begins_no_connection_and_has_no_address_of_its_own() -> None:
    """Nor is it in a subnet that has a way out."""
    assert [rule["CidrIp"] for rule in RESOURCES["DatabaseGroup"]["Properties"]["SecurityGroupEgress"]] == [
        "127.0.0.1/32"
    ]
    for database in of_type("AWS::RDS::DBInstance").values():
        assert database["PubliclyAccessible"] is False
    routed = {
        name for one in of_type("AWS::EC2::SubnetRouteTableAssociation").values() for name in refs(one["SubnetId"])
    }
    assert routed.isdisjoint({"DatabaseSubnetA", "DatabaseSubnetB"})


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_gets_out_only_where_it_calls_somebody(name: str) -> None:
    """A charge that were made to run other code could send what it reads nowhere."""
    statements = [
        statement for policy in FUNCTIONS[name].get("Policies", []) for statement in policy.get("Statement", [])
    ]
    calls = bool(statements) or name == "MigrateFunction"
    assert ("OutboundGroup" in groups(name)) == calls


def test_one_group_alone_leads_out() -> None:
    """To anywhere, and over HTTPS; to a database of which the port is known, to that port."""
    for name, group in of_type("AWS::EC2::SecurityGroup").items():
        for rule in group["SecurityGroupEgress"]:
            if rule.get("CidrIp") == ANYWHERE:
                assert (name, rule["FromPort"], rule["ToPort"]) == ("OutboundGroup", 443, 443)


def test_the_loss_of_a_zone_is_not_the_loss_of_the_way_out() -> None:
    """With a NAT gateway in each, each zone's functions go through their own; with one, through that."""
    assert RESOURCES["PrivateRouteA"]["Properties"]["NatGatewayId"] == {"Ref": "NatA"}
    either = {"Fn::If": ["HasNatPerZone", {"Ref": "NatB"}, {"Ref": "NatA"}]}
    assert RESOURCES["PrivateRouteB"]["Properties"]["NatGatewayId"] == either
    assert RESOURCES["NatB"]["Condition"] == "HasNatPerZone"


def test_the_first_deployment_migrates_when_there_is_a_way() -> None:
    """To the database and back to CloudFormation, which would otherwise wait for an answer until its time is over."""
    way = {
        name
        for name, resource in RESOURCES.items()
        if resource["Type"] in {"AWS::EC2::Route", "AWS::EC2::SubnetRouteTableAssociation"} and "Private" in name
    }
    assert refs(RESOURCES["Migration"]["Properties"]["Needs"]) - {"AWS::NoValue"} == way | {
        *("DatabaseAdmission", "ExistingDatabaseAdmission", "ClusterWriter", "S3Endpoint")
    }


def test_nothing_in_the_network_is_public() -> None:
    """No subnet gives an address to what is put in it; the public ones hold NAT gateways."""
    for subnet in of_type("AWS::EC2::Subnet").values():
        assert not subnet.get("MapPublicIpOnLaunch", False)
    used = {name for function in FUNCTIONS for name in refs(FUNCTIONS[function].get("VpcConfig"))}
    assert used.isdisjoint({"PublicSubnetA", "PublicSubnetB"})
