"""The page of a server that wants a key."""

from pathlib import Path
from typing import Any

from playwright.async_api import expect
from tests.chromium import NEEDED, SOME_TEXT, Opener, hear_file
from tests.e2e.test_page import no_serious_finding

pytestmark = NEEDED
KEPT = "Object.values(sessionStorage).concat(Object.values(localStorage), document.cookie).filter(Boolean)"


async def test_it_asks_for_the_key_and_uses_it(open_page: Opener, keyed_server: Any, tmp_path: Path):
    page = await open_page(server=keyed_server)
    field, error, status = (page.locator(name) for name in ("#key-value", "#key-error", "#status"))
    await expect(status).to_have_text("The server wants its key.")
    await expect(page.get_by_label("Key of this server")).to_be_focused()
    assert await field.get_attribute("type") == "password" and await field.get_attribute("autocomplete") == "off"
    await no_serious_finding(page)
    for wrong in ("wrong", "two words"):
        await field.fill(wrong)
        await field.press("Enter")
        await expect(error).to_have_text("That is not the key of this server.")
        await expect(field).to_have_attribute("aria-invalid", "true")
        await no_serious_finding(page)
        await field.fill("")
        await page.click("#microphone")
        await expect(error).to_have_text("")  # what was wrong is not told of what is asked for anew
        await expect(field).to_be_focused()
    assert await page.evaluate(KEPT) == []
    await field.fill(keyed_server.key)
    await field.press("Enter")
    await expect(status).to_have_text("Ready.")
    await expect(field).to_be_hidden()
    await hear_file(page)
    await expect(page.locator("#text")).to_have_text(SOME_TEXT)
    assert await page.evaluate(KEPT) == [keyed_server.key]
    await page.reload()
    await page.click("#microphone")
    await expect(status).to_have_text("Listening.")
    await expect(field).to_be_hidden()
    await page.click("#microphone")
    await expect(status).to_contain_text("Finished")
    unreadable = tmp_path / "no.audio"
    unreadable.write_bytes(b"nothing")
    await page.set_input_files("#file", unreadable)
    await expect(status).to_contain_text("format")  # the server's answer to the upload
    await page.evaluate("sessionStorage.clear()")
    await page.set_input_files("#file", unreadable)
    await expect(status).to_have_text("The server wants its key.")
    await expect(field).to_be_focused()
    told = open_page.problems  # type: ignore[attr-defined]
    assert all(any(why in problem for why in ("401", "400", "credentials")) for problem in told)  # as it should be
    told.clear()
