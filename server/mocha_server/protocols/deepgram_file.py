"""`POST /v1/listen`: Deepgram's pre-recorded transcription. The body is the file; it is spooled, never held whole."""

import asyncio
import hashlib
import tempfile
import uuid
from datetime import UTC, datetime
from typing import IO, Any

import orjson
from fastapi import APIRouter, Request, Response
from starlette.exceptions import HTTPException

from mocha_server.audio import AudioError, decode_file
from mocha_server.engine import Engine
from mocha_server.messages import ErrorCode, Segment, Word
from mocha_server.protocols.deepgram_options import OptionError, RawOptions, favoured, raw_options, refusal
from mocha_server.protocols.upload import Upload, decode_raw, limited
from mocha_server.stream import EngineError

router = APIRouter()
IN_MEMORY_BYTES = 1 << 20
JSON = {"content-type": "application/json"}


@router.post("/v1/listen")
async def listen_file(request: Request) -> Response:
    """Transcribe the audio file that is the body; query parameters as in Deepgram's API."""
    engine: Engine = request.app.state.file_engine
    request_id = str(uuid.uuid4())
    with tempfile.SpooledTemporaryFile(max_size=IN_MEMORY_BYTES) as file:
        try:
            options, phrases = raw_options(request.query_params), favoured(request.query_params)
            if request.headers.get("content-type", "").startswith("application/json"):
                raise OptionError("this server fetches no URLs: send the audio itself as the body")
            sha256 = await _spool(limited(request), file)
            upload = _upload(engine, file, options, phrases)
            segments = await upload.segments(request)
        except OptionError as error:
            return refusal(400, "INVALID_QUERY_PARAMETER", str(error), request_id)
        except HTTPException as error:
            return refusal(error.status_code, "Payload Too Large", error.detail, request_id)
        except AudioError as error:
            return refusal(400, "Bad Request", f"{error} ({error.code.value})", request_id)
        except EngineError as error:
            full = error.code is ErrorCode.SERVER_FULL
            return refusal(503 if full else 500, error.code.value, str(error), request_id)
    utterances = request.query_params.get("utterances", "false").lower() == "true"
    metadata = _metadata(request_id, sha256, upload.seconds, engine.info.name)
    return Response(orjson.dumps({"metadata": metadata, "results": _results(segments, utterances)}), 200, JSON)


async def _spool(request: Request, file: IO[bytes]) -> str:
    """Write the body to `file` and rewind it; gives its SHA-256."""
    sha256 = hashlib.sha256()
    async for piece in request.stream():
        sha256.update(piece)
        await asyncio.to_thread(file.write, piece)
    file.seek(0)
    return sha256.hexdigest()


def _upload(engine: Engine, file: IO[bytes], options: RawOptions | None, phrases: tuple[str, ...]) -> Upload:
    rate = engine.info.sample_rate
    return Upload(engine, decode_raw(file, options.start(), rate) if options else decode_file(file, rate), phrases)


def _metadata(request_id: str, sha256: str, seconds: float, model: str) -> dict[str, Any]:
    return {
        "transaction_key": "deprecated",
        "request_id": request_id,
        "sha256": sha256,
        "created": datetime.now(UTC).isoformat(),
        "duration": round(seconds, 3),
        "channels": 1,
        "models": [model],
        "model_info": {model: {"name": model, "version": "1", "arch": "mocha"}},
    }


def _results(segments: list[Segment], utterances: bool) -> dict[str, Any]:
    words = [word for segment in segments for word in segment.words]
    alternative = {
        "transcript": " ".join(segment.text for segment in segments),
        "confidence": _confidence(words),
        "words": [_word(word) for word in words],
    }
    results: dict[str, Any] = {"channels": [{"alternatives": [alternative]}]}
    if utterances:
        results["utterances"] = [_utterance(segment) for segment in segments]
    return results


def _utterance(segment: Segment) -> dict[str, Any]:
    return {
        "id": str(uuid.uuid4()),
        "start": segment.start,
        "end": segment.end,
        "confidence": _confidence(segment.words),
        "channel": 0,
        "transcript": segment.text,
        "words": [_word(word) for word in segment.words],
    }


def _word(word: Word) -> dict[str, Any]:
    return {**word.model_dump(), "punctuated_word": word.word}


def _confidence(words: list[Word]) -> float:
    return round(sum(w.confidence for w in words) / len(words), 4) if words else 0.0
