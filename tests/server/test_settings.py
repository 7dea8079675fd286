"""The page of settings tells what there is."""

from pathlib import Path

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
