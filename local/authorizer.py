"""Who is calling, on this machine: the header X-Local-Principal says it, and without it the caller is `local`.

A function that the embedded stack alone puts before its API, in place of the IAM that the template asks for and the
emulator has not. It is in no template, so no deployment can be made to believe this header.
"""

from typing import Any

HEADER = "x-local-principal"
DEFAULT = "local"


def handler(event: dict[str, Any], _context: object) -> dict[str, Any]:
    """Admits everyone, under the name they give."""
    headers = {name.lower(): value for name, value in (event.get("headers") or {}).items()}
    principal = headers.get(HEADER) or DEFAULT
    # The emulator takes an invocation without a line of log for unfinished, and waits another 50 ms for one.
    print(f"{HEADER}: {principal}")
    return {
        "principalId": principal,
        "policyDocument": {
            "Version": "2012-10-17",
            "Statement": [{"Effect": "Allow", "Action": "execute-api:Invoke", "Resource": event["methodArn"]}],
        },
    }
