"""A stand-in for SNS in a container, so that what listens is reached by the functions' containers alone.

It accepts every event, and prints it as it came. It also has what functions ask Secrets Manager for: one secret, made
anew at its start. A program of the standard library alone, for whichever Python 3.13 is
in the image. The embedded stack has a real emulator in its place.
"""

import http.server
import json
import secrets
import uuid
from urllib.parse import parse_qs

PORT = 80

_SECRET = secrets.token_hex(32)

_ATTRIBUTES = """\
<GetTopicAttributesResponse xmlns="http://sns.amazonaws.com/doc/2010-03-31/"><GetTopicAttributesResult><Attributes/>
</GetTopicAttributesResult></GetTopicAttributesResponse>"""
_RESULT = """\
<PublishBatchResponse xmlns="http://sns.amazonaws.com/doc/2010-03-31/"><PublishBatchResult><Successful>{}</Successful>
<Failed/></PublishBatchResult></PublishBatchResponse>"""
_ACCEPTED = "<member><Id>{}</Id><MessageId>{}</MessageId></member>"


class Endpoint(http.server.BaseHTTPRequestHandler):
    """Answers the two calls that the relay makes, and the one that is made for webhooks."""

    def do_POST(self) -> None:
        """Accept the events of a PublishBatch; a topic has no attribute that the relay would heed."""
        content = self.rfile.read(int(self.headers["Content-Length"])).decode()
        if self.headers["X-Amz-Target"] == "secretsmanager.GetSecretValue":
            self._answer(json.dumps({"SecretString": _SECRET}), "application/x-amz-json-1.1")
            return
        fields = parse_qs(content)
        if fields["Action"] == ["GetTopicAttributes"]:
            self._answer(_ATTRIBUTES)
            return
        accepted = ""
        entry = "PublishBatchRequestEntries.member.1"
        while f"{entry}.Id" in fields:
            print(fields[f"{entry}.Message"][0], flush=True)
            accepted += _ACCEPTED.format(fields[f"{entry}.Id"][0], uuid.uuid4())
            entry = f"PublishBatchRequestEntries.member.{accepted.count('<member>') + 1}"
        self._answer(_RESULT.format(accepted))

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Say nothing: the log is for events."""

    def _answer(self, text: str, content_type: str = "text/xml") -> None:
        content = text.encode()
        self.send_response(http.HTTPStatus.OK)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


if __name__ == "__main__":
    http.server.ThreadingHTTPServer(("", PORT), Endpoint).serve_forever()
