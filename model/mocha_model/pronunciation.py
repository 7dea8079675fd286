"""How words are said: their phones, as espeak-ng says them (Debian package espeak-ng)."""

import subprocess
from collections.abc import Iterable, Sequence

VOICE = "en-us"
AFTER = "so"  # said after each word, which would be named, not said, if it were a single letter
WORDS = 1000  # said by one call, in a second or two
TIMEOUT_S = 30  # of a program that hangs
NO_PHONE = str.maketrans("", "", "',%=|:;~*!?#-2")  # stress, length, pauses, glottal stops, and shades of one phone
REDUCED = {"a#": "@"}


class PronunciationError(ValueError):
    """Words that cannot be said; the message says why."""


def pronounce(words: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The phones of each word, as espeak-ng says it, in its own notation without stress; none where it says several.

    `words` are normalised. Raises PronunciationError.
    """
    unique = sorted(set(words))
    said: dict[str, tuple[str, ...]] = {}
    for start in range(0, len(unique), WORDS):
        said |= _pronounce(unique[start : start + WORDS])
    return said


def _pronounce(words: Sequence[str]) -> dict[str, tuple[str, ...]]:
    command = ["espeak-ng", "-q", "-x", "--sep=_", "-v", VOICE, "--stdin"]
    text = "".join(f"{word} {AFTER}.\n\n" for word in words)
    try:
        said = subprocess.run(command, input=text, capture_output=True, text=True, check=True, timeout=TIMEOUT_S).stdout
    except FileNotFoundError as error:
        raise PronunciationError("phones are what espeak-ng says: install the Debian package espeak-ng") from error
    except OSError as error:
        raise PronunciationError(f"espeak-ng cannot be started ({error.strerror})") from error
    except subprocess.CalledProcessError as error:
        raise PronunciationError(f"espeak-ng: {error.stderr.strip()}") from error
    except subprocess.TimeoutExpired as error:
        raise PronunciationError(f"espeak-ng says nothing within {TIMEOUT_S} s") from error
    lines = [line.split() for line in said.splitlines() if line.strip()]
    if len(lines) != len(words):
        raise PronunciationError(f"espeak-ng says {len(words)} words in {len(lines)} lines")
    return {word: _phones(parts[0]) if len(parts) == 2 else () for word, parts in zip(words, lines, strict=True)}


def _phones(said: str) -> tuple[str, ...]:
    each = (REDUCED.get(phone, phone.translate(NO_PHONE)) for phone in said.split("_"))
    return tuple(phone for phone in each if phone)
