"""A stand-in for whom the functions call, in a process of its own: a topic and its queue, and a receiver of webhooks.

It does as little as it can, so that what is measured is its caller. boto3 speaks to it as to AWS, Secrets Manager
included.
"""

import asyncio
import contextlib
import hashlib
import json
import multiprocessing
import re
import ssl
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from urllib.parse import parse_qs

REGION = "eu-central-1"
TOPIC_ARN = f"arn:aws:sns:{REGION}:111122223333:charge-events"
QUEUE_URL = f"https://sqs.{REGION}.amazonaws.com/111122223333/charge-events"
MASTER_KEY_ARN = f"arn:aws:secretsmanager:{REGION}:111122223333:secret:WebhookMasterKey-AbCdEf"

# Whose certificate the receiver has.
RECEIVER = "localhost"

_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_IDS = re.compile(rb"PublishBatchRequestEntries\.member\.\d+\.Id=([^&]+)")
_HEAD_BYTES = 64 * 1024
# A webhook is a connection, and a dispatcher opens dozens at once: one that is not let in tries again after a second.
_BACKLOG = 1024

# SNS's answers, as far as boto3 reads them.
_ATTRIBUTES = (
    b"<GetTopicAttributesResponse><GetTopicAttributesResult><Attributes/></GetTopicAttributesResult>"
    b"</GetTopicAttributesResponse>"
)
_PUBLISHED = b"<PublishResponse><PublishResult><MessageId>1</MessageId></PublishResult></PublishResponse>"
_BATCH = (
    b"<PublishBatchResponse><PublishBatchResult><Successful>%b</Successful><Failed/></PublishBatchResult>"
    b"</PublishBatchResponse>"
)
_ACCEPTED = b"<member><Id>%b</Id><MessageId>%b</MessageId></member>"

_MASTER_KEY = json.dumps({"SecretString": 32 * "k"}).encode()

_PROCESSES = multiprocessing.get_context("spawn")


@contextlib.contextmanager
def serve(*, latency_seconds: float = 0.0, delivers: bool = False, certificate: Path | None = None) -> Iterator[str]:
    """Runs the broker for as long as the block lasts, and yields its address.

    Every answer about the topic, or to a webhook, comes after the latency. With `delivers` what is published can be
    received from the queue, once; else it is forgotten. With a certificate, a file of it and its key for RECEIVER, it
    speaks TLS.
    """
    here, there = _PROCESSES.Pipe()
    process = _PROCESSES.Process(target=_run, args=(there, latency_seconds, delivers, certificate), daemon=True)
    process.start()
    there.close()
    try:
        port = here.recv()
        yield f"http://127.0.0.1:{port}" if certificate is None else f"https://{RECEIVER}:{port}"
    finally:
        here.close()
        process.join()


def variables(address: str) -> dict[str, str]:
    """The environment that leads boto3 to the broker, whatever else is set for it here."""
    return {
        "AWS_ENDPOINT_URL_SNS": address,
        "AWS_ENDPOINT_URL_SQS": address,
        "AWS_ENDPOINT_URL_SECRETS_MANAGER": address,
        "AWS_ACCESS_KEY_ID": "bench",
        "AWS_SECRET_ACCESS_KEY": "bench",
        "AWS_DEFAULT_REGION": REGION,
    }


def _run(caller: Connection, latency_seconds: float, delivers: bool, certificate: Path | None) -> None:
    tls = None
    if certificate is not None:
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(certificate)
    asyncio.run(_Broker(latency_seconds, delivers=delivers).serve(caller, tls))


class _Broker:
    def __init__(self, latency_seconds: float, *, delivers: bool) -> None:
        self._latency_seconds = latency_seconds
        self._delivers = delivers
        self._queue: asyncio.Queue[str] = asyncio.Queue()

    async def serve(self, caller: Connection, tls: ssl.SSLContext | None) -> None:
        server = await asyncio.start_server(
            self._converse, "127.0.0.1", 0, limit=_HEAD_BYTES, backlog=_BACKLOG, ssl=tls
        )
        ended = asyncio.Event()
        # The pipe breaks when the process that wants the broker has no more use for it, or is dead.
        asyncio.get_running_loop().add_reader(caller.fileno(), ended.set)
        caller.send(server.sockets[0].getsockname()[1])
        await ended.wait()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = _LENGTH.search(head)
                body = await reader.readexactly(int(length[1]) if length else 0)
                content = await self._answered(head, body)
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(content), content))
        writer.close()

    async def _answered(self, head: bytes, body: bytes) -> bytes:
        if b"AmazonSQS." in head:
            return await self._sqs(head, body)
        if b"secretsmanager." in head:
            return _MASTER_KEY
        if self._latency_seconds:
            await asyncio.sleep(self._latency_seconds)
        return b"" if head.startswith(b"POST /webhooks ") else self._sns(body)

    def _sns(self, body: bytes) -> bytes:
        if b"Action=GetTopicAttributes" in body:
            return _ATTRIBUTES
        if self._delivers:
            for name, (message,) in parse_qs(body.decode()).items():
                if name.endswith(".Message"):
                    self._queue.put_nowait(message)
        if b"Action=PublishBatch&" not in body:
            return _PUBLISHED
        return _BATCH % b"".join(_ACCEPTED % (entry, entry) for entry in _IDS.findall(body))

    async def _sqs(self, head: bytes, body: bytes) -> bytes:
        if b"AmazonSQS.ReceiveMessage" not in head:
            return b"{}"
        try:
            message = await asyncio.wait_for(self._queue.get(), json.loads(body).get("WaitTimeSeconds", 0))
        except TimeoutError:
            return b"{}"
        digest = hashlib.md5(message.encode(), usedforsecurity=False).hexdigest()
        received = {"MessageId": digest, "ReceiptHandle": digest, "MD5OfBody": digest, "Body": message}
        return json.dumps({"Messages": [received]}).encode()
