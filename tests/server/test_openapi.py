"""What the API's documentation says is what the server answers."""

from pathlib import Path
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator

from mocha_server.protocols.openai_transcriptions import FORMATS

FIXTURES = Path(__file__).parents[1] / "fixtures"


@pytest.fixture(scope="module")
def paths(lively_server: Any) -> dict[str, Any]:
    document = httpx.get(f"{lively_server.http}/openapi.json").json()
    assert document["openapi"].startswith("3.1")  # whose schemas are those of JSON Schema's draft 2020-12
    return document["paths"]


def check(operation: dict[str, Any], response: httpx.Response) -> None:
    """The status, the type and the body of `response` are documented for `operation`."""
    content = operation["responses"][str(response.status_code)]["content"]
    schema = content[response.headers["content-type"].partition(";")[0]]["schema"]
    Draft202012Validator.check_schema(schema)
    body = response.json() if "json" in response.headers["content-type"] else response.text
    Draft202012Validator(closed(schema)).validate(body)


def closed(schema: Any) -> Any:
    """The same, and nothing may be in an object that is not named."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    names = {"additionalProperties": False} if isinstance(schema.get("properties"), dict) else {}
    return {key: closed(value) for key, value in schema.items()} | names


def test_gets(paths: dict[str, Any], lively_server: Any):
    gets = {path: operations["get"] for path, operations in paths.items() if "get" in operations}
    assert len(gets) == 4
    for path, operation in gets.items():
        check(operation, httpx.get(lively_server.http + path.format(name="lively")))
    check(gets["/v1/models/{name}"], httpx.get(f"{lively_server.http}/v1/models/other"))


@pytest.mark.parametrize("options", [*({"response_format": name} for name in FORMATS), {"stream": "true"}], ids=str)
def test_transcriptions(paths: dict[str, Any], lively_server: Any, options: dict[str, str]):
    operation = paths["/v1/audio/transcriptions"]["post"]
    fields = operation["requestBody"]["content"]["multipart/form-data"]["schema"]["properties"]
    assert options.keys() <= fields.keys()
    with (FIXTURES / "weather.wav").open("rb") as file:
        response = httpx.post(
            f"{lively_server.http}/v1/audio/transcriptions", files={"file": file}, data=options, timeout=60
        )
    assert response.status_code == 200
    check(operation, response)


def test_listen(paths: dict[str, Any], lively_server: Any):
    operation = paths["/v1/listen"]["post"]
    options = {"utterances": "true", "paragraphs": "true", "keyterm": "weather"}
    assert options.keys() <= {parameter["name"] for parameter in operation["parameters"]}
    audio = (FIXTURES / "weather.wav").read_bytes()
    response = httpx.post(f"{lively_server.http}/v1/listen", params=options, content=audio, timeout=60)
    assert response.status_code == 200
    check(operation, response)


def test_a_key_that_is_needed(paths: dict[str, Any], keyed_server: Any):
    document = httpx.get(f"{keyed_server.http}/openapi.json").json()
    (scheme,) = document["components"]["securitySchemes"].items()
    assert scheme[1] == {"type": "http", "scheme": "bearer"} and document["security"] == [{scheme[0]: []}]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            response = httpx.request(method, keyed_server.http + path.format(name="lively"))
            assert response.status_code == (200 if path == "/health" else 401)
            assert (operation.get("security") == []) == (path == "/health")
            check(operation, response)
    assert not any("401" in operation["responses"] for path in paths.values() for operation in path.values())


@pytest.mark.parametrize("path", ["/v1/audio/transcriptions", "/v1/listen"])
def test_errors(paths: dict[str, Any], lively_server: Any, make_server: Any, lively: Any, path: str):
    small = make_server(lively, max_upload_mb=1)
    for server, size, status in ((lively_server, 1000, 400), (small, 2_000_000, 413)):
        sent = {"content": bytes(size)} if path == "/v1/listen" else {"files": {"file": bytes(size)}}
        response = httpx.post(server.http + path, timeout=60, **sent)
        assert response.status_code == status
        check(paths[path]["post"], response)
