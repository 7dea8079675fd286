"""What Deepgram's live and pre-recorded answers have alike: words, metadata, errors."""

from datetime import datetime
from typing import Any

from fastapi.responses import JSONResponse

from mocha_server.messages import Word
from mocha_server.protocols.upload import RETRY


def model_info(name: str) -> dict[str, str]:
    """The model that answers."""
    return {"name": name, "version": "1", "arch": "mocha"}


def alternative(transcript: str, words: list[Word]) -> dict[str, Any]:
    """A transcript, the mean confidence of its words, and these."""
    confidence = round(sum(w.confidence for w in words) / len(words), 4) if words else 0.0
    listed = [{**w.model_dump(), "punctuated_word": w.word} for w in words]
    return {"transcript": transcript, "confidence": confidence, "words": listed}


def metadata(request_id: str, sha256: str, created: datetime, seconds: float, channels: int) -> dict[str, Any]:
    """Of all the audio that came."""
    return {
        "transaction_key": "deprecated",
        "request_id": request_id,
        "sha256": sha256,
        "created": created.isoformat(),
        "duration": round(seconds, 3),
        "channels": channels,
    }


def refusal(status: int, code: str, message: str, request_id: str) -> JSONResponse:
    """Deepgram's error body."""
    body: dict[str, Any] = {"err_code": code, "err_msg": message, "request_id": request_id}
    headers = {"dg-request-id": request_id, "dg-error": message, **RETRY.get(status, {})}
    return JSONResponse(body, status_code=status, headers=headers)
