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


def test_a_key_is_shown_nowhere(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MOCHA_API_KEY", "s3cret")
    settings = Settings()
    assert settings.api_key is not None and settings.api_key.get_secret_value() == "s3cret"
    assert "s3cret" not in f"{settings!r} {settings} {settings.model_dump_json()}"
    for wrong in ("s3cret s3cret", "s3cret\n", "s3crét", "s3cret/+=", "s3cret,"):  # browsers could not send it
        with pytest.raises(ValueError, match="api_key") as refused:
            Settings(api_key=wrong)
        assert "s3cr" not in str(refused.value)
    monkeypatch.setenv("MOCHA_API_KEY", "")
    assert Settings().api_key is None


def test_origins_are_as_browsers_send_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MOCHA_ALLOW_ORIGINS", " https://App.example/,http://localhost:5173 ")
    assert Settings().allow_origins == ("https://app.example", "http://localhost:5173")
    for wrong in ("app.example", "https://app.example/page", "https://*.example", "null"):
        with pytest.raises(ValueError, match="allow_origins"):
            Settings(allow_origins=wrong)
