"""The API's documentation in a real browser, as a proxy has it below a path of its own."""

from typing import Any

from playwright.async_api import Route, expect
from tests.chromium import NEEDED, Opener

pytestmark = NEEDED
PREFIX = "/speech"


async def test_requests_can_be_tried_below_a_prefix(open_page: Opener, lively_server: Any):
    async def proxy(route: Route) -> None:
        inner = route.request.url.replace(PREFIX, "", 1)
        await route.fulfill(response=await route.fetch(url=inner))

    page = await open_page()
    await page.route(f"{lively_server.http}{PREFIX}/**", proxy)
    await page.goto(f"{lively_server.http}{PREFIX}/docs")
    await expect(page.locator(".info")).to_contain_text("/v1/stream")
    await expect(page.locator(".opblock-summary-path", has_text="transcriptions")).to_be_visible()
    health = page.locator(".opblock", has_text="/health")
    await health.locator("button").first.click()
    await health.get_by_role("button", name="Try it out").click()
    await health.get_by_role("button", name="Execute").click()
    await expect(health.locator(".request-url")).to_contain_text(f"{lively_server.http}{PREFIX}/health")
    await expect(health.locator(".live-responses-table")).to_contain_text('"capacity"')


async def test_a_key_is_asked_for_once(open_page: Opener, keyed_server: Any):
    page = await open_page(server=keyed_server)
    await page.goto(f"{keyed_server.http}/docs")
    await page.click(".auth-wrapper .authorize")
    await page.fill(".modal-ux input", keyed_server.key)
    await page.click(".modal-ux button[type=submit]")
    await page.click(".modal-ux .btn-done")
    models = page.locator("#operations-default-models_v1_models_get")
    await models.locator("button").first.click()
    await models.get_by_role("button", name="Try it out").click()
    await models.get_by_role("button", name="Execute").click()
    await expect(models.locator(".live-responses-table")).to_contain_text('"lively"')
    open_page.problems.clear()  # type: ignore[attr-defined] - the page before was refused
