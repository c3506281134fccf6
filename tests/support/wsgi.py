"""Functions as a WSGI application, for tools that speak HTTP."""

from collections.abc import Callable, Iterable, Iterator
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qsl

from tests.support.invocation import Answer, Event
from tests.support.shapes import Request, rest

type Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


def application(call: Callable[[Event], Answer], principals: Iterator[str]) -> Application:
    """Each request becomes a REST event of the next caller's; the answer goes back as it is."""

    def serve(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        headers = [
            (name.removeprefix("HTTP_").replace("_", "-"), value)
            for name, value in environ.items()
            if name.startswith("HTTP_") or name == "CONTENT_TYPE"
        ]
        body = environ["wsgi.input"].read()
        answer = call(
            rest(
                Request(
                    method=environ["REQUEST_METHOD"],
                    path=environ["PATH_INFO"].encode("latin-1").decode(errors="replace"),
                    query=dict(parse_qsl(environ.get("QUERY_STRING", ""), keep_blank_values=True)),
                    headers=headers,
                    body=body or None,
                    principal=next(principals),
                )
            )
        )
        start_response(f"{answer.status} {HTTPStatus(answer.status).phrase}", list(answer.headers.items()))
        return [answer.body.encode()]

    return serve
