"""The built template, deployed to the emulator through CloudFormation, and what a person needs beside it.

It is what `sam deploy` does, without the ten seconds that takes: artifacts go to a bucket, their addresses into the
template, the template into a stack. Three things come on top that are in no template: a queue for a person to read, the
authorizer that stands in for IAM, and leave for webhooks to go to this machine.
"""

import dataclasses
import hashlib
import io
import json
import time
import uuid
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import boto3
import yaml

from charging.settings import LOOPBACK
from local import build
from local.emulator import ACCESS_KEY_ID, REGION, SECRET_ACCESS_KEY, Emulator
from local.errors import StackError
from local.postgres import DATABASE, HOST, OWNER, Server

STACK = "charges"
BUCKET = "artifacts"
TEMPLATE_KEY = "template.json"
QUEUE = "charges-events"
AUTHORIZER = "local-principal"
# A stack takes two seconds.
DEPLOY_SECONDS = 120.0
# A batch takes the subscriber well under a second, once it is warm. A person who has pressed Ctrl-C waits for this.
DRAIN_SECONDS = 3.0

# The property by which a resource names a folder of the build.
ARTIFACTS = {"AWS::Serverless::Function": "CodeUri", "AWS::Serverless::LayerVersion": "ContentUri"}


@dataclasses.dataclass(frozen=True, slots=True)
class Deployment:
    """Where the deployed service is. `queue_url` is the queue for a person, beside the subscriber's own."""

    api_url: str
    topic_arn: str
    queue_url: str
    subscriber_queue_url: str
    relay_function: str


def deploy(emulator: Emulator, server: Server, *, relays: bool, parameters: Mapping[str, str]) -> Deployment:
    """Deploy the built template with the database's address in it, and start the relay and the webhooks' dispatcher.

    With `relays` false neither is started, and their schedules are taken away. `parameters` are for the template,
    beside those that say where this stack's own parts are. Raises StackError for one that the template does not have,
    and with CloudFormation's reasons where the deployment fails.
    """
    session = _session()
    secret = keep_passwords(session, emulator.url, functions=server.functions_password, owner=server.password)
    given = _parameters(server, secret, relays=relays)
    _check(parameters, taken=given)
    values = {**given, **parameters}
    with build.undisturbed():
        template_url = upload(session, emulator.url, values)
    outputs = create_stack(session, emulator.url, STACK, template_url, values)
    for function in ("EndpointsFunction", "WebhooksFunction"):
        _allow_loopback(session, emulator.url, outputs[function])
    queue_url = _subscribe(session, emulator.url, outputs["TopicArn"])
    api_id = outputs["ApiUrl"].removeprefix("https://").partition(".")[0]
    stage = outputs["ApiUrl"].rpartition("/")[2]
    _attach_authorizer(session, emulator.url, api_id, stage)
    for sender in ("RelayFunction", "WebhooksFunction"):
        if relays:
            # Scheduler starts it a minute after the deployment for the first time. An event is not to wait for that.
            session.client("lambda", endpoint_url=emulator.url).invoke(
                FunctionName=outputs[sender], InvocationType="Event"
            )
        else:
            _unschedule(session, emulator.url, outputs[sender])
    return Deployment(
        api_url=f"{emulator.url}/_aws/execute-api/{api_id}/{stage}",
        topic_arn=outputs["TopicArn"],
        queue_url=queue_url,
        subscriber_queue_url=outputs["QueueUrl"],
        relay_function=outputs["RelayFunction"],
    )


def drain(emulator: Emulator, deployment: Deployment) -> bool:
    """Wait, for a moment at most, until the subscriber has taken what was published: the emulator forgets the rest.

    False where something is still in the subscriber's queue, or with the subscriber.
    """
    sqs = _session().client("sqs", endpoint_url=emulator.url)
    deadline = time.monotonic() + DRAIN_SECONDS
    while time.monotonic() < deadline:
        counts = sqs.get_queue_attributes(
            QueueUrl=deployment.subscriber_queue_url,
            AttributeNames=["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"],
        )["Attributes"]
        if not any(map(int, counts.values())):
            return True
        time.sleep(0.05)
    return False


def _session() -> boto3.Session:
    return boto3.Session(ACCESS_KEY_ID, SECRET_ACCESS_KEY, region_name=REGION)


def upload(session: boto3.Session, endpoint: str, parameters: Mapping[str, str]) -> str:
    """The address of the template, in a bucket, with the folders of the build replaced by objects beside it."""
    s3 = session.client("s3", endpoint_url=endpoint)
    s3.create_bucket(Bucket=BUCKET)
    template = yaml.safe_load(build.TEMPLATE.read_text())
    for resource in template["Resources"].values():
        if name := ARTIFACTS.get(resource["Type"]):
            archive = _archive(build.TEMPLATE.parent / resource["Properties"][name])
            key = f"{hashlib.sha256(archive).hexdigest()}.zip"
            s3.put_object(Bucket=BUCKET, Key=key, Body=archive)
            resource["Properties"][name] = f"s3://{BUCKET}/{key}"
    # Where SAM itself decides by a parameter, the emulator's SAM knows no value but the default.
    for name, value in parameters.items():
        template["Parameters"][name]["Default"] = value
    # CloudFormation takes 51,200 bytes of a template in a call, and 1 MB from a bucket.
    s3.put_object(Bucket=BUCKET, Key=TEMPLATE_KEY, Body=json.dumps(template).encode())
    return f"{endpoint}/{BUCKET}/{TEMPLATE_KEY}"


def keep_passwords(session: boto3.Session, endpoint: str, *, functions: str, owner: str) -> str:
    """The ARN of a secret with the passwords of the functions' roles and of the database's owner."""
    secret = json.dumps({"functions": functions, "owner": owner})
    manager = session.client("secretsmanager", endpoint_url=endpoint)
    arn: str = manager.create_secret(Name=f"database-{uuid.uuid4()}", SecretString=secret)["ARN"]
    return arn


def _parameters(server: Server, secret_arn: str, *, relays: bool) -> dict[str, str]:
    """What this deployment gives the template's parameters."""
    parameters = {
        "Architecture": build.architecture(),
        "Network": "none",
        "Database": "existing",
        "GradualDeployment": "false",
        "Emulated": "true",
        "DatabaseHost": HOST,
        "DatabasePort": str(server.port),
        "DatabaseName": DATABASE,
        "DatabaseUser": OWNER,
        "DatabaseSecretArn": secret_arn,
    }
    # What is invoked by hand sends what is there, and ends.
    return parameters if relays else parameters | {"RelayBudgetSeconds": "0", "WebhooksBudgetSeconds": "0"}


def _check(parameters: Mapping[str, str], *, taken: Mapping[str, str]) -> None:
    known = yaml.safe_load(build.TEMPLATE.read_text())["Parameters"].keys() - taken
    if unknown := parameters.keys() - known:
        raise StackError(
            f"The template's parameters cannot be given so: {', '.join(sorted(unknown))}.",
            means="The template has no such parameter, or the embedded stack needs it for itself.",
            remedy=f"choose among {', '.join(sorted(known))}.",
        )


def _archive(*sources: Path) -> bytes:
    """A zip of a folder's contents, or of single files. Stored, not deflated: it travels within this machine."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_STORED) as archive:
        for source in sources:
            for path in sorted(source.rglob("*")) if source.is_dir() else [source]:
                archive.write(path, path.relative_to(source if source.is_dir() else source.parent))
    return content.getvalue()


def create_stack(
    session: boto3.Session, endpoint: str, name: str, template_url: str, parameters: Mapping[str, str]
) -> Mapping[str, str]:
    """The outputs of the finished stack."""
    cloudformation = session.client("cloudformation", endpoint_url=endpoint)
    cloudformation.create_stack(
        StackName=name,
        TemplateURL=template_url,
        Parameters=[{"ParameterKey": name, "ParameterValue": value} for name, value in parameters.items()],
        Capabilities=["CAPABILITY_IAM", "CAPABILITY_AUTO_EXPAND"],
        OnFailure="DO_NOTHING",
    )
    deadline = time.monotonic() + DEPLOY_SECONDS
    while (stack := cloudformation.describe_stacks(StackName=name)["Stacks"][0])["StackStatus"].endswith("_PROGRESS"):
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    if stack["StackStatus"] != "CREATE_COMPLETE":
        events = cloudformation.describe_stack_events(StackName=name)["StackEvents"]
        reasons = [
            f"    {event['LogicalResourceId']} ({event['ResourceType']}): {event.get('ResourceStatusReason', '')}"
            for event in events
            if event["ResourceStatus"].endswith("_FAILED")
        ]
        raise StackError(
            "\n".join([f"The stack is {stack['StackStatus']}.", *reasons]),
            means="The template could not be deployed to the emulated AWS.",
            remedy="see the reasons above; `make template` checks the template itself.",
        )
    return {output["OutputKey"]: output["OutputValue"] for output in stack["Outputs"]}


def _subscribe(session: boto3.Session, endpoint: str, topic_arn: str) -> str:
    """The URL of a queue that gets every event as it is."""
    sqs = session.client("sqs", endpoint_url=endpoint)
    url = sqs.create_queue(QueueName=QUEUE)["QueueUrl"]
    arn = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
    session.client("sns", endpoint_url=endpoint).subscribe(
        TopicArn=topic_arn, Protocol="sqs", Endpoint=arn, Attributes={"RawMessageDelivery": "true"}
    )
    return url


def _allow_loopback(session: boto3.Session, endpoint: str, function: str) -> None:
    """Let the function take receivers on this machine, which no template can."""
    functions = session.client("lambda", endpoint_url=endpoint)
    variables = functions.get_function_configuration(FunctionName=function)["Environment"]["Variables"]
    functions.update_function_configuration(
        FunctionName=function, Environment={"Variables": variables | {LOOPBACK: "allowed"}}
    )


def _unschedule(session: boto3.Session, endpoint: str, function: str) -> None:
    """Take away the schedule that starts the function."""
    scheduler = session.client("scheduler", endpoint_url=endpoint)
    for schedule in scheduler.list_schedules()["Schedules"]:
        if schedule["Target"]["Arn"].endswith(f":{function}"):
            scheduler.delete_schedule(Name=schedule["Name"], GroupName=schedule["GroupName"])


def _attach_authorizer(session: boto3.Session, endpoint: str, api_id: str, stage: str) -> None:
    """Let `local.authorizer` say who the caller is, where the template asks for IAM."""
    function = session.client("lambda", endpoint_url=endpoint).create_function(
        FunctionName=AUTHORIZER,
        Runtime="python3.13",
        Handler="authorizer.handler",
        Role="arn:aws:iam::000000000000:role/local",
        Code={"ZipFile": _archive(Path(__file__).with_name("authorizer.py"))},
    )
    gateway = session.client("apigateway", endpoint_url=endpoint)
    authorizer = gateway.create_authorizer(
        restApiId=api_id,
        name=AUTHORIZER,
        type="REQUEST",
        authorizerUri=f"arn:aws:apigateway:{REGION}:lambda:path/2015-03-31/functions/{function['FunctionArn']}/invocations",
        # No caching: the next request may come from somebody else.
        authorizerResultTtlInSeconds=0,
    )
    changes: list[Any] = [
        {"op": "replace", "path": "/authorizationType", "value": "CUSTOM"},
        {"op": "replace", "path": "/authorizerId", "value": authorizer["id"]},
    ]
    for resource in gateway.get_resources(restApiId=api_id, embed=["methods"], limit=500)["items"]:
        for method in resource.get("resourceMethods", {}):
            gateway.update_method(
                restApiId=api_id, resourceId=resource["id"], httpMethod=method, patchOperations=changes
            )
    gateway.create_deployment(restApiId=api_id, stageName=stage)
