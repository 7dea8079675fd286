"""The bundled models where nobody says anything."""

from collections.abc import Callable

import pytest
import torch

from mocha_model.emissions import text_of
from mocha_model.recognizer import Recognizer

RATE = 16_000
SEARCHES: dict[str, Callable[[Recognizer], Recognizer]] = {
    "live": lambda bundled: bundled,
    "with patience": lambda bundled: bundled.searching(64, patience_s=0.8),
    "files": lambda bundled: bundled.searching(256),
}
NOTHING = {
    "silence": torch.zeros(20 * RATE),
    "soft noise": torch.randn(20 * RATE, generator=torch.Generator().manual_seed(1)) * 0.001,
    "loud noise": torch.randn(20 * RATE, generator=torch.Generator().manual_seed(2)) * 0.1,
    "hum": 0.05 * torch.sin(2 * torch.pi * 50 * torch.arange(20 * RATE) / RATE),
}


@pytest.fixture(scope="module", params=SEARCHES)
def search(request: pytest.FixtureRequest, bundled: Recognizer) -> Recognizer:
    return SEARCHES[request.param](bundled)


@pytest.mark.parametrize("kind", NOTHING)
def test_nothing_is_read_where_nothing_is_said(search: Recognizer, kind: str):
    assert text_of(search.transcribe(NOTHING[kind])) == ""
