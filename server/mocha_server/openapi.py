"""What the API's documentation says, and its page at `/docs`, which loads nothing from other hosts.

Describes what the adapters of HTTP answer. OpenAPI has no WebSockets: those are named in the description.
"""

from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse
from fastapi.staticfiles import StaticFiles

DESCRIPTION = """Speech to text, by files here and live over WebSockets:

| WebSocket | speaks |
|---|---|
| `/v1/stream` | mocha-asr's own protocol |
| `/v1/realtime` | OpenAI's, for sessions that transcribe |
| `/v1/listen` | Deepgram's |
| `/` | that of vosk-server |
"""
ASSETS = "docs-assets"
Schema = dict[str, Any]
TEXT, NUMBER, INTEGER, BYTES = (
    {"type": "string"},
    {"type": "number"},
    {"type": "integer"},
    {"type": "string", "format": "binary"},
)
router = APIRouter()


@router.get("/docs", include_in_schema=False)
async def page() -> HTMLResponse:
    """Swagger UI; what it loads is beside it, at whatever path a proxy has the server."""
    return get_swagger_ui_html(
        openapi_url="openapi.json",
        title="mocha-asr",
        swagger_js_url=f"{ASSETS}/swagger-ui-bundle.js",
        swagger_css_url=f"{ASSETS}/swagger-ui.css",
        swagger_favicon_url="data:,",
    )


def add_page(app: FastAPI) -> None:
    """Put it into `app`."""
    app.include_router(router)
    app.mount(f"/{ASSETS}", StaticFiles(packages=[("fastapi_offline", "static")]))


def describe_key(app: FastAPI) -> None:
    """Say that all but `/health` needs a key, and what is answered without: the page has a button for it then."""
    plain = app.openapi

    def keyed() -> Schema:
        document = plain()
        document.setdefault("components", {})["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
        for path, operations in document["paths"].items():
            for operation in operations.values():
                if path == "/health":
                    operation["security"] = []
                else:
                    refused = DEEPGRAM_ERROR if path == "/v1/listen" else OPENAI_ERROR
                    operation["responses"]["401"] = _json("no key was given, or not the right one", refused)
        return document

    app.openapi = keyed  # type: ignore[method-assign]


def _object(optional: Schema | None = None, /, **required: Schema) -> Schema:
    return {"type": "object", "properties": required | (optional or {}), "required": list(required)}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _one_of(names: tuple[str, ...]) -> Schema:
    return {"type": "string", "enum": list(names)}


def _json(description: str, schema: Schema) -> Schema:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _refusals(schema: Schema) -> dict[int | str, Schema]:
    """Why a file is not transcribed, in a protocol's own form."""
    return {status: _json(description, schema) for status, description in REFUSALS.items()}


REFUSALS = {
    400: "a field cannot be used, or the file is no audio that can be read",
    408: "nothing more of the body came",
    413: "the file is larger than this server takes",
    500: "the recogniser failed on this audio",
    503: "no more files for now, or the server stops: try again later",
}

OPENAI_ERROR = _object(error=_object({"param": {"type": ["string", "null"]}}, message=TEXT, type=TEXT, code=TEXT))
USAGE = _object(type=TEXT, seconds=INTEGER)
WORD = _object(word=TEXT, start=NUMBER, end=NUMBER)
SEGMENT = _object(
    id=INTEGER,
    seek=INTEGER,
    start=NUMBER,
    end=NUMBER,
    text=TEXT,
    tokens=_list(INTEGER),
    temperature=NUMBER,
    avg_logprob=NUMBER,
    compression_ratio=NUMBER,
    no_speech_prob=NUMBER,
)
SHORT = _object(text=TEXT, usage=USAGE)
VERBOSE = _object(
    {"words": _list(WORD), "segments": _list(SEGMENT)},
    task=TEXT,
    language=TEXT,
    duration=NUMBER,
    text=TEXT,
    usage=USAGE,
)
MODEL = _object(id=TEXT, object=TEXT, created=INTEGER, owned_by=TEXT)
MODELS: dict[int | str, Schema] = {200: _json("The models", _object(object=TEXT, data=_list(MODEL)))}
ONE_MODEL: dict[int | str, Schema] = {
    200: _json("The model", MODEL),
    404: _json("There is no such model", OPENAI_ERROR),
}
TRANSCRIPTIONS: dict[int | str, Schema] = {
    200: {
        "description": "The transcript, as `response_format` and `stream` say",
        "content": {
            "application/json": {"schema": {"anyOf": [VERBOSE, SHORT]}},
            "text/plain": {"schema": TEXT},
            "text/event-stream": {"schema": TEXT},
        },
    },
    **_refusals(OPENAI_ERROR),
}


def transcription_form(formats: tuple[str, ...], granularities: tuple[str, ...]) -> Schema:
    """The body of a transcription's request; others of OpenAI's fields are accepted and ignored."""
    form = _object(
        {
            "model": TEXT,
            "response_format": _one_of(formats) | {"default": formats[0]},
            "timestamp_granularities[]": _list(_one_of(granularities)),
            "stream": {"type": "boolean", "default": False},
            "keywords[]": _list(TEXT),
        },
        file=BYTES,
    )
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": form}}}}


DEEPGRAM_WORD = _object(word=TEXT, start=NUMBER, end=NUMBER, confidence=NUMBER, punctuated_word=TEXT)
DEEPGRAM_ALTERNATIVE = _object(
    {"paragraphs": {"type": "object"}}, transcript=TEXT, confidence=NUMBER, words=_list(DEEPGRAM_WORD)
)
DEEPGRAM_METADATA = _object(
    transaction_key=TEXT,
    request_id=TEXT,
    sha256=TEXT,
    created=TEXT,
    duration=NUMBER,
    channels=INTEGER,
    models=_list(TEXT),
    model_info={"type": "object"},
)
DEEPGRAM_RESULTS = _object(
    {"utterances": _list({"type": "object"})}, channels=_list(_object(alternatives=_list(DEEPGRAM_ALTERNATIVE)))
)
DEEPGRAM_ERROR = _object(err_code=TEXT, err_msg=TEXT, request_id=TEXT)
LISTEN: dict[int | str, Schema] = {
    200: _json("The transcript", _object(metadata=DEEPGRAM_METADATA, results=DEEPGRAM_RESULTS)),
    **_refusals(DEEPGRAM_ERROR),
}
LISTEN_REQUEST: Schema = {
    "requestBody": {"required": True, "content": {"application/octet-stream": {"schema": BYTES}}},
    "parameters": [
        {"name": name, "in": "query", "description": description, "schema": schema}
        for name, description, schema in (
            ("encoding", "of a file without a header: how its samples are written", TEXT),
            ("sample_rate", "of a file without a header, Hz", INTEGER),
            ("channels", "of a file without a header", INTEGER),
            ("keyterm", "phrases to expect", _list(TEXT)),
            ("paragraphs", "add paragraphs", {"type": "boolean"}),
            ("utterances", "add utterances", {"type": "boolean"}),
        )
    ],
}

HEALTH_BODY = _object(status=TEXT, model=TEXT, streams=INTEGER, capacity=INTEGER)
HEALTH: dict[int | str, Schema] = {
    200: _json("It takes streams and files", HEALTH_BODY),
    503: _json("It does not, or not both", HEALTH_BODY),
}
METRICS: dict[int | str, Schema] = {
    200: {"description": "Prometheus' text format", "content": {"text/plain": {"schema": TEXT}}}
}
