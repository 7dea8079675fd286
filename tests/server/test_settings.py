"""The page of settings tells what there is."""

from pathlib import Path

import pytest

from mocha_server.settings import Settings

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"


def test_the_page_has_every_setting_with_its_default_and_meaning():
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `MOCHA_")]
    expected = []
    for name, field in Settings.model_fields.items():
        default = field.default if isinstance(field.default, str) else f"{field.default:g}" if field.default else "0"
        unset = "-" if field.default is None else default
        expected.append(f"| `MOCHA_{name.upper()}` | {unset} | {field.description} |")
    assert rows == expected


def test_a_setting_that_is_empty_is_not_set(monkeypatch: pytest.MonkeyPatch):
    for name in ("HOST", "WYOMING_PORT", "MODEL"):
        monkeypatch.setenv(f"MOCHA_{name}", "")
    assert Settings() == Settings(host="127.0.0.1", wyoming_port=None, model=None)
    with pytest.raises(ValueError, match="host"):
        Settings(host="")  # would be every address
    monkeypatch.setenv("MOCHA_MAX_BUFFER_S", "inf")
    with pytest.raises(ValueError, match="max_buffer_s"):
        Settings()
