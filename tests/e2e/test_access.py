"""Keys and origins, over real sockets: what SDKs send unmodified, and what is refused how."""

import http.client
import select
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from deepgram import DeepgramClient
from deepgram.core.api_error import ApiError
from deepgram.environment import DeepgramClientEnvironment
from openai import AsyncOpenAI, OpenAI
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

FIXTURES = Path(__file__).parents[1] / "fixtures"
LISTEN = "/v1/listen?encoding=linear16&sample_rate=16000"
SOCKETS = ["/", "/v1/stream", "/v1/realtime", LISTEN]
APP = "https://app.example"
# The SDK imports an old name of websockets' for a fallback.
pytestmark = pytest.mark.filterwarnings("ignore:websockets.* is deprecated:DeprecationWarning")


def address(server: Any, path: str) -> str:
    return f"ws://127.0.0.1:{server.port}{path}"


async def refusal(url: str, **options: Any) -> Any:
    """The answer to a handshake that is no WebSocket."""
    with pytest.raises(InvalidStatus) as refused:
        await connect(url, **options).__aenter__()
    return refused.value.response


def is_openais(response: httpx.Response) -> bool:
    error = response.json()["error"]
    return (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")


@pytest.mark.parametrize("scheme", [None, "Bearer", "Token", "Basic"])
def test_requests_need_the_key(keyed_server: Any, scheme: str | None):
    right = {"Authorization": f"{scheme} {keyed_server.key}"} if scheme else {}
    wrong = {"Authorization": f"{scheme} {keyed_server.key}x"} if scheme else {}
    for path in ("/v1/models", "/metrics", "/v1/models/lively", "/v1/nothing", "/nothing", "//v1/models"):
        refused = httpx.get(keyed_server.http + path, headers=wrong)
        assert refused.status_code == 401 and refused.headers["www-authenticate"] == "Bearer" and is_openais(refused)
        status = httpx.get(keyed_server.http + path, headers=right).status_code
        assert (status == 401) == (scheme in (None, "Basic"))
    assert httpx.get(f"{keyed_server.http}/v1/models?key={keyed_server.key}").status_code == 401  # is logged by proxies
    assert keyed_server.key not in refused.text


def test_the_page_its_files_the_description_and_probes_need_none(keyed_server: Any):
    paths = ["/", "/index.html", "/app.js", "/key.js", "/style.css", "/client/mocha-asr.js"]
    paths += ["/health", "/docs", "/docs-assets/swagger-ui.css", "/openapi.json"]
    assert {path: httpx.get(keyed_server.http + path).status_code for path in paths} == dict.fromkeys(paths, 200)
    for path in ("/client/../v1/models", "/docs-assets/..%2f../metrics"):  # httpx would resolve the first
        plain = http.client.HTTPConnection("127.0.0.1", keyed_server.port)
        plain.request("GET", path)
        assert plain.getresponse().status == 404
        plain.close()


def test_openais_sdk(keyed_server: Any):
    for key in ("wrong", keyed_server.key):
        with (
            OpenAI(api_key=key, base_url=f"{keyed_server.http}/v1", max_retries=0) as client,
            (FIXTURES / "weather.wav").open("rb") as file,
        ):
            if key == "wrong":
                with pytest.raises(openai.AuthenticationError) as refused:
                    client.audio.transcriptions.create(file=file, model="whisper-1")
                assert refused.value.code == "invalid_api_key"
            else:
                assert client.audio.transcriptions.create(file=file, model="whisper-1").text
                assert [model.id for model in client.models.list()] == ["lively"]


async def test_openais_sdk_live(keyed_server: Any):
    for key in ("wrong", keyed_server.key):
        async with AsyncOpenAI(api_key=key, base_url=f"{keyed_server.http}/v1", max_retries=0) as client:
            connecting = client.realtime.connect(model="whisper-1")
            if key == "wrong":
                with pytest.raises(InvalidStatus) as refused:
                    await connecting.__aenter__()
                assert refused.value.response.status_code == 401
                assert b"invalid_api_key" in (refused.value.response.body or b"")
            else:
                async with connecting as connection:
                    assert (await connection.recv()).type == "session.created"


def deepgram(server: Any, key: str, http_client: httpx.Client) -> DeepgramClient:
    ws = f"ws://127.0.0.1:{server.port}"
    environment = DeepgramClientEnvironment(base=server.http, production=ws, agent=ws, agent_rest=server.http)
    return DeepgramClient(api_key=key, environment=environment, httpx_client=http_client)


def test_deepgrams_sdk(keyed_server: Any):
    audio = (FIXTURES / "weather.wav").read_bytes()
    raw = {"model": "nova-3", "encoding": "linear16", "sample_rate": 16_000}
    with httpx.Client(timeout=60) as http_client:
        right = deepgram(keyed_server, keyed_server.key, http_client).listen.v1
        assert right.media.transcribe_file(request=audio).results.channels[0].alternatives[0].transcript
        with right.connect(**raw) as connection:
            connection.send_media(audio)
            connection.send_close_stream()
            assert [message.type for message in connection][-1] == "Metadata"
        wrong = deepgram(keyed_server, "wrong", http_client).listen.v1
        with pytest.raises(ApiError) as refused:
            wrong.media.transcribe_file(request=audio)
        assert refused.value.status_code == 401 and refused.value.body["err_code"] == "INVALID_AUTH"
        with pytest.raises((ApiError, InvalidStatus)) as shut, wrong.connect(**raw):
            pass
        status = getattr(shut.value, "status_code", None) or shut.value.response.status_code  # type: ignore[union-attr]
        assert status == 401


@pytest.mark.parametrize("path", SOCKETS)
async def test_sockets_need_the_key(keyed_server: Any, path: str):
    url, key = address(keyed_server, path), keyed_server.key
    code = b"INVALID_AUTH" if "listen" in path else b"invalid_api_key"
    for wrong in ({}, {"subprotocols": ["bearer", "x"]}, {"subprotocols": [key]}, {"subprotocols": ["other", key]}):
        refused = await refusal(url, **wrong)
        assert refused.status_code == 401 and refused.headers["www-authenticate"] == "Bearer" and code in refused.body
    async with connect(url, additional_headers={"Authorization": f"Bearer {key}"}) as socket:
        assert socket.subprotocol is None
    for scheme in ("bearer", "token"):  # browsers take no answer without one of those that they offered
        async with connect(url, subprotocols=[scheme, key]) as socket:  # type: ignore[list-item]
            assert socket.subprotocol == scheme
    offered: Any = ["realtime", f"openai-insecure-api-key.{key}", "openai-beta.realtime-v1"]
    async with connect(url, subprotocols=offered) as socket:
        assert socket.subprotocol == ("realtime" if "realtime" in path else None)


@pytest.mark.parametrize("path", ["/v1/audio/transcriptions", "/v1/listen", "/nothing"])
def test_a_refused_upload_breaks_no_connection(keyed_server: Any, path: str):
    connection = http.client.HTTPConnection("127.0.0.1", keyed_server.port, timeout=60)

    def body() -> Iterator[bytes]:
        yield bytes(1_000_000)
        assert not select.select([connection.sock], [], [], 0.3)[0]  # answered too early, it would be closed too early
        yield bytes(1_000_000)

    connection.request("POST", path, body=body(), encode_chunked=True)
    answer = connection.getresponse()
    assert answer.status == 401 and answer.read()
    connection.request("GET", "/v1/models", headers={"Authorization": f"Bearer {keyed_server.key}"})
    assert connection.getresponse().status == 200
    connection.close()


def test_pages_of_allowed_origins_may_use_requests(keyed_server: Any):
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization, x-stainless-os"}
    url, key = f"{keyed_server.http}/v1/audio/transcriptions", {"Authorization": f"Bearer {keyed_server.key}"}
    preflight = httpx.options(url, headers={"Origin": APP, **asks})
    assert preflight.status_code == 200 and preflight.headers["access-control-allow-origin"] == APP
    assert "POST" in preflight.headers["access-control-allow-methods"]
    assert "x-stainless-os" in preflight.headers["access-control-allow-headers"]
    models = f"{keyed_server.http}/v1/models"
    for headers, status in (({}, 401), (key, 200)):
        answer = httpx.get(models, headers={"Origin": APP, **headers})
        assert answer.status_code == status and answer.headers["access-control-allow-origin"] == APP
    assert httpx.options(url, headers={"Origin": "https://evil.example", **asks}).status_code == 400
    assert (
        "access-control-allow-origin"
        not in httpx.get(models, headers={"Origin": "https://evil.example", **key}).headers
    )


async def test_pages_of_other_origins_may_open_no_sockets(keyed_server: Any):
    key = {"Authorization": f"Bearer {keyed_server.key}"}
    for path in SOCKETS:
        url = address(keyed_server, path)
        for origin in ("https://evil.example", "null", "https://[", f"{APP}.evil.example", f"{keyed_server.http}0"):
            refused = await refusal(url, additional_headers=key, origin=origin)  # type: ignore[arg-type]
            code = b"FORBIDDEN" if "listen" in path else b"origin_not_allowed"
            assert refused.status_code == 403 and code in refused.body
        for origin in (APP, "https://other.example", keyed_server.http):
            async with connect(url, additional_headers=key, origin=origin):  # type: ignore[arg-type]
                pass
    assert (await refusal(keyed_server.url, origin=APP)).status_code == 401  # type: ignore[arg-type]


async def test_all_origins_or_none_said(make_server: Any, lively: Any, lively_server: Any):
    anywhere: Any = "https://evil.example"
    for server, allowed in ((make_server(lively, allow_origins="*"), "*"), (lively_server, None)):
        async with httpx.AsyncClient() as client:
            answer = await client.get(f"{server.http}/v1/models", headers={"Origin": anywhere})
        assert answer.status_code == 200 and answer.headers.get("access-control-allow-origin") == allowed
        async with connect(server.url, origin=anywhere):
            pass
