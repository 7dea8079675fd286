"""The command `mocha-asr`: finds its sub-commands by entry points and imports only the one asked for; and `stream`."""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Iterator
from importlib.metadata import entry_points, version
from typing import Annotated, Any

import typer
from rich.console import Console

from mocha_client.client import DEFAULT_URL, ClientError, StreamingClient
from mocha_client.sources import SourceError, file_pieces, microphone_pieces
from mocha_server.messages import Segment, Text

console = Console(stderr=True)
SUMMARIES = {
    "bench": "Load a server, or the engine alone, with many paced streams of speech and report.",
    "serve": "Serve WebSocket streams, file uploads and the microphone page.",
    "stream": "Send files, a pipe or the microphone to a server; characters appear as they are emitted.",
    "transcribe": "Transcribe files on this machine, without a server.",
    "train": "Train a recogniser.",
    "evaluate": "Measure a recogniser on a corpus.",
    "report": "Draw the loss curves and alignments of a training run.",
    "calibrate": "Fit the confidence of words to how often they are right.",
    "align": "Draw where in a recording the model listens for each character.",
    "synthesize": "Read text aloud with every free voice here, as training data.",
    "prepare-timit": "Read TIMIT in its own layout into manifests.",
    "prepare-kaldi": "Read a corpus that Kaldi has prepared, such as WSJ, into manifests.",
    "train-lm": "Train a character language model for beam search.",
}


def main() -> None:
    """Entry point of the command line."""
    commands = {point.name: point for point in entry_points(group="mocha_asr.commands")}
    asked = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if asked == "--version":
        print(version("mocha-asr"))
    elif asked in commands:
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        app.command(name=asked)(commands[asked].load())
        sys.argv = [f"mocha-asr {asked}", *sys.argv[2:]]
        app()
    else:
        print("Usage: mocha-asr COMMAND ...   (mocha-asr COMMAND --help explains one)\n")
        for name in sorted(commands):
            print(f"  {name:<14}{SUMMARIES.get(name, '')}")
        if asked not in ("--help", "-h"):
            console.print(f"[red]error:[/red] no such command: {asked}")
            raise SystemExit(2)


def stream(
    files: Annotated[list[str] | None, typer.Argument(help='audio files of any format; "-" is standard input')] = None,
    url: Annotated[str, typer.Option(help="the server's native endpoint")] = DEFAULT_URL,
    chunk_ms: Annotated[int, typer.Option(min=1, max=60_000, help="audio in each message")] = 100,
    realtime: Annotated[bool, typer.Option(help="pace files as if they were spoken now")] = False,
    microphone: Annotated[bool, typer.Option(help="listen to the microphone until Ctrl-C")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object per file at its end, nothing else")] = False,
) -> None:
    """Send audio to a server; characters appear as they are emitted."""
    if microphone == bool(files):
        console.print("[red]error:[/red] give files, or - for a pipe, or --microphone")
        raise typer.Exit(2)
    try:
        if microphone:
            asyncio.run(_stream(microphone_pieces(chunk_ms), url, as_json))
        for path in files or []:
            pieces = _paced(file_pieces(path, chunk_ms), chunk_ms / 1000 if realtime else 0.0)
            asyncio.run(_stream(pieces, url, as_json))
    except (ClientError, SourceError) as error:
        console.print(f"[red]error:[/red] {error}")
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        print()


async def _paced(pieces: Iterator[bytes], period_s: float) -> AsyncIterator[bytes]:
    """Pieces, each no earlier than its audio would have been spoken."""
    began = time.monotonic()
    for number, piece in enumerate(pieces, 1):
        if period_s:
            await asyncio.sleep(max(0.0, began + number * period_s - time.monotonic()))
        yield piece


async def _stream(pieces: AsyncIterator[bytes], url: str, as_json: bool) -> None:
    began = time.monotonic()
    result: dict[str, Any] = {"text": "", "words": [], "characters": []}
    async with StreamingClient(url) as client:
        async for event in client.transcribe(pieces):
            if isinstance(event, Text):
                received = round(time.monotonic() - began, 4)
                result["text"] += event.delta
                result["characters"] += [c.model_dump() | {"received": received} for c in event.characters]
                if not as_json:
                    print(event.delta, end="", flush=True)
            elif isinstance(event, Segment):
                result["words"] += [w.model_dump() for w in event.words]
    result["text"] = result["text"].strip()
    print(json.dumps(result, ensure_ascii=False) if as_json else "")
