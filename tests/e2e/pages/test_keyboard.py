"""The web pages work with the keyboard alone: Tab reaches every control, the focus is visible,
and dialogs keep the focus and then return it.
"""

import pytest

from tests.kits.services.browser import chromium, shared_browser
from tests.kits.services.shown import ShownPools, shown

pytestmark = pytest.mark.skipif(chromium() is None, reason="needs Debian's package chromium")

SEEN = {
    "/": "document.querySelector('#ready').textContent.includes('Ready')",
    "/dashboard": "document.querySelector('#lanes .hit') && document.querySelector('#strip .mark')"
    " && document.querySelector('#order-forms form')",
    "/play": "document.querySelector('[name=model]').value == 'tiny'",
}
# All elements that Tab must reach: visible, enabled, and not inside an arrow-key group.
STOPS = """
(() => {
  const all = 'a, button, input, select, textarea, summary, [tabindex]';
  const folded = (each) => each.closest('details:not([open]) > :not(summary)');
  window.stops = [...document.querySelectorAll(all)].filter((each) =>
    each.tabIndex >= 0 && !each.disabled && each.getClientRects().length && !folded(each));
  window.reached = new Set();
})()
"""
# Records which element has the focus. Returns the errors of this element, or "".
LOOK = """
(() => {
  const one = document.activeElement;
  if (one === document.body) return '';
  window.reached.add(one);
  const part = one instanceof SVGElement && one.querySelector('.halo, rect');
  const drawn = part ? getComputedStyle(part).stroke !== 'none'
    : getComputedStyle(one).outlineStyle !== 'none';
  const place = one.getBoundingClientRect();
  const bar = document.querySelector('header');
  const covers = getComputedStyle(bar).position === 'sticky' && !bar.contains(one);
  const top = covers && !one.classList.contains('skip') ? bar.getBoundingClientRect().bottom : 0;
  const told = one.outerHTML.slice(0, 100);
  if (!drawn) return `no focus is drawn: ${told}`;
  return place.bottom <= top || place.top >= innerHeight ? `not in view: ${told}` : '';
})()
"""
FOCUS = "document.activeElement.dataset.key ?? document.activeElement.id"


@pytest.fixture(scope="module")
def tabs():
    with shared_browser() as found:
        yield found


@pytest.fixture(scope="module")
def url():
    with shown(ShownPools()) as address:
        yield address


def page_of(tabs, url, path="/dashboard"):
    return tabs.looking(url + path, SEEN[path])


async def tab_to(page, selector, most=80):
    """Presses Tab until the expected element has the focus."""
    for _ in range(most):
        await page.press("Tab")
        if await page.run(f"document.activeElement.matches({selector!r})"):
            return
    raise AssertionError(f"Tab does not reach {selector}")


@pytest.mark.parametrize("path", list(SEEN))
def test_tab_reaches_everything_and_focus_is_seen(tabs, url, path):
    async def check():
        async with page_of(tabs, url, path) as page:
            if path == "/dashboard":
                await page.press("p")  # pauses the page, so that it does not change
            await page.run(STOPS)
            for _ in range(await page.run("window.stops.length") + 3):
                await page.press("Tab")
                assert await page.run(LOOK) == ""
            missed = await page.run(
                "window.stops.filter((each) => !window.reached.has(each))"
                ".map((each) => each.outerHTML.slice(0, 120))"
            )
            assert missed == []

    tabs.run(check())


def test_arrows_go_along_lanes_and_enter_opens_a_request(tabs, url):
    async def check():
        async with page_of(tabs, url) as page:
            await page.run(  # the lanes' time span now includes all requests
                "document.querySelector('#lane-span').value = '60';"
                "document.querySelector('#lane-span').dispatchEvent(new Event('input'))"
            )
            await tab_to(page, "#lanes .hit")
            first = await page.run(FOCUS)
            tip = await page.run("document.querySelector('#tip:not([hidden])').innerText")
            assert "s" in tip
            await page.press("ArrowUp")
            second = await page.run(FOCUS)
            assert second != first
            await page.run("window.drawn = document.querySelector('#lanes svg'); undefined")
            await page.until("!window.drawn.isConnected")  # the lanes are redrawn every second
            assert await page.run(FOCUS) == second
            await page.press("Enter")
            await page.until("document.querySelector('dialog[open]')")
            await page.press("Escape")
            await page.until("!document.querySelector('dialog')")
            assert await page.run(FOCUS) == second

    tabs.run(check())


def test_arrows_go_along_marks_and_enter_shows_the_entry(tabs, url):
    async def check():
        async with page_of(tabs, url) as page:
            await tab_to(page, "#strip .mark")
            await page.press("Home")
            first = await page.run(FOCUS)
            await page.press("ArrowRight")
            second = await page.run(FOCUS)
            assert second != first
            tip = await page.run("document.querySelector('#tip:not([hidden])').innerText")
            await page.press("Escape")
            assert await page.run("document.querySelector('#tip').hidden")
            await page.press("Enter")
            entry = await page.run("document.activeElement.matches('#events .told')")
            assert entry
            assert await page.run(FOCUS) == second
            shown = await page.run("document.activeElement.innerText")
            assert tip.split("\n")[0].split(" ", 1)[1].split(" ")[0] in shown

    tabs.run(check())


def test_dialogs_keep_the_focus_and_give_it_back(tabs, url):
    async def check():
        async with page_of(tabs, url) as page:
            await page.run("sessionStorage.setItem('baton.admin', 'k')")
            await tab_to(page, "#workers button")
            button = await page.run(FOCUS)
            assert button.startswith("flip ")
            await page.press("Enter")
            await page.until("document.querySelector('dialog[open]')")
            for _ in range(8):
                await page.press("Tab")
                assert await page.run(
                    # the focus is outside the page, on the browser's controls
                    "document.activeElement === document.body"
                    " || Boolean(document.activeElement.closest('dialog'))"
                )
            await page.press("Escape")
            await page.until("!document.querySelector('dialog')")
            assert await page.run(FOCUS) == button
            await page.press("Enter")
            await page.until("document.querySelector('dialog [value]')")
            await page.press("Enter")  # previews the first role; no controller answers
            text = await page.until("document.querySelector('dialog .bad')?.innerText")
            assert "Not possible: the controller does not answer" in text
            await page.press("Escape")
            await page.until("!document.querySelector('dialog')")
            assert await page.run(FOCUS) == button
            assert all("503" in each for each in page.complaints)
            page.complaints.clear()

    tabs.run(check())


def test_keys_of_the_page_go_to_its_parts_and_do_not_disturb_fields(tabs, url):
    async def check():
        async with page_of(tabs, url) as page:
            await page.press("6")
            assert await page.run("document.activeElement.id") == "t-events"
            await tab_to(page, "#event-filter")
            for key in "t1k":
                await page.press(key)
            assert await page.run("document.querySelector('#event-filter').value") == "t1k"
            assert await page.run("document.querySelector('dialog')") is None
            await page.run("document.activeElement.blur()")
            await page.press("k")
            await page.until("document.querySelector('dialog input[type=password]')")

    tabs.run(check())


def test_playground_is_used_by_the_keyboard_alone(tabs, url):
    async def check():
        async with page_of(tabs, url, "/play") as page:
            await tab_to(page, "#prompt")
            await page.press("Enter")  # submits the example request
            await page.until("document.querySelector('.msg.fault')")
            users = "[...document.querySelectorAll('.msg.user')].map((m) => m.innerText).join()"
            assert "What is the capital of France?" in await page.run(users)
            page.complaints.clear()
            for key in "yo":
                await page.press(key)
            await page.press("Enter")
            await page.until(f"({users}).includes('yo')")
            await page.until("document.querySelector('.msg.fault')")
            assert "maximum context length is 64" in await page.run(
                "document.querySelector('.msg.fault').innerText"
            )
            page.complaints.clear()
            await page.run("document.querySelector('[name=max_tokens]').value = 8")
            await tab_to(page, ".msg.fault button")
            await page.press("Enter")
            await page.until("document.querySelector('.msg.assistant')")
            await page.until("document.querySelector('#timeline svg')")
            assert await page.run("document.querySelector('.msg.fault')") is None
            told = "document.querySelector('.msg.assistant .marked')"
            assert await page.run(f"{told}.innerText") == "an answer <b>of</b> code"
            assert await page.run(f"{told}.querySelector('em').innerText") == "answer"
            fonts = await page.run(f"getComputedStyle({told}.querySelector('code')).fontFamily")
            assert "mono" in fonts

    tabs.run(check())
