"""The built template as `sam local` serves it.

Three things differ from what is deployed, and they are in a copy: it is for this machine's processor; an authorizer of
this machine's own stands where the template asks for IAM, which `sam local` has not; and each layer is a published one,
as it is for a function in AWS, which `sam local` finds already downloaded. It would build an image anew for every
invocation with a layer that is still a part of the template.
"""

import hashlib
import shutil
from pathlib import Path
from typing import Any

import yaml

from local import build
from local.emulator import REGION

ACCOUNT = "000000000000"
TOPIC_ARN = f"arn:aws:sns:{REGION}:{ACCOUNT}:charges-events"
MASTER_KEY_ARN = f"arn:aws:secretsmanager:{REGION}:{ACCOUNT}:secret:WebhookMasterKey-AbCdEf"
AUTHORIZER = "LocalAuthorizer"
INVOCATION = "arn:aws:apigateway:${AWS::Region}:lambda:path/2015-03-31/functions"
# The database is one that is given, and what an account alone has is not made.
PARAMETERS = {"Database": "existing", "Network": "none", "GradualDeployment": "false"}
FUNCTION, LAYER = "AWS::Serverless::Function", "AWS::Serverless::LayerVersion"


def write(folder: Path, *, aws: str) -> None:
    """Make the folder, with the template in it, the folders that the template names, and the layers.

    `aws` is where every call of the functions to AWS goes.
    """
    with build.undisturbed():
        shutil.copytree(build.TEMPLATE.parent, folder)
    template = yaml.safe_load((folder / "template.yaml").read_text())
    for name, value in PARAMETERS.items():
        template["Parameters"][name]["Default"] = value
    template["Parameters"]["Architecture"]["Default"] = build.architecture()
    resources = template["Resources"]
    arns = {
        name: _publish(folder / resources.pop(name)["Properties"]["ContentUri"], folder / "layers", name)
        for name in [name for name, resource in resources.items() if resource["Type"] == LAYER]
    }
    common = template["Globals"]["Function"]
    for properties in [common, *(one["Properties"] for one in resources.values() if one["Type"] == FUNCTION)]:
        if "Layers" in properties:
            properties["Layers"] = [arns[layer["Ref"]] for layer in properties["Layers"]]
    common["Environment"]["Variables"]["AWS_ENDPOINT_URL"] = aws
    _authorize(template, folder)
    (folder / "template.yaml").write_text(yaml.safe_dump(template, sort_keys=False))


def _authorize(template: dict[str, Any], folder: Path) -> None:
    """Let `local.authorizer` say who the caller is, where the template asks for IAM."""
    source = Path(__file__).with_name("authorizer.py")
    (folder / AUTHORIZER).mkdir()
    shutil.copy(source, folder / AUTHORIZER)
    template["Resources"][AUTHORIZER] = {
        "Type": FUNCTION,
        "Properties": {"CodeUri": AUTHORIZER, "Handler": f"{source.stem}.handler"},
    }
    schemes = template["Resources"]["Api"]["Properties"]["DefinitionBody"]["components"]["securitySchemes"]
    schemes["Caller"] = {
        "type": "apiKey",
        "name": "Unused",
        "in": "header",
        "x-amazon-apigateway-authtype": "custom",
        "x-amazon-apigateway-authorizer": {
            "type": "request",
            "authorizerUri": {"Fn::Sub": f"{INVOCATION}/${{{AUTHORIZER}.Arn}}/invocations"},
            # No caching: the next request may come from somebody else.
            "authorizerResultTtlInSeconds": 0,
        },
    }


def _publish(built: Path, published: Path, name: str) -> str:
    """Move a built layer to where sam local keeps those that it has downloaded: its ARN.

    The name says what is in the layer. sam local calls the image that it makes of layers by their names, and takes an
    image of that name for the one that it needs.
    """
    content = hashlib.sha256()
    for path in sorted(path for path in built.rglob("*") if path.is_file()):
        content.update(f"{path.relative_to(built)}\0{path.stat().st_size}\0".encode())
        content.update(path.read_bytes())
    unique = f"{name}-{content.hexdigest()[:16]}"
    arn = f"arn:aws:lambda:{REGION}:{ACCOUNT}:layer:{unique}:1"
    published.mkdir(exist_ok=True)
    built.rename(published / f"{unique}-1-{hashlib.sha256(arn.encode()).hexdigest()[:10]}")
    return arn
