"""The web pages in a real browser, in light, dark and phone layouts: they work, fit, obey their
content policy and are accessible. They show the history of a real pool machine.

Skipped without Chromium; axe-core needs npm.
"""

import asyncio
import os
import subprocess
import tarfile
from pathlib import Path

import pytest

from engine.messages import Role
from tests.kits.services.browser import chromium, shared_browser
from tests.kits.services.shown import ShownPools, shown

pytestmark = pytest.mark.skipif(chromium() is None, reason="needs Debian's package chromium")

AXE = "axe-core@4.14.1"
RULES = "{runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'best-practice']}"
SEEN = {  # expressions that are true once a page has loaded its contents
    "/": "document.querySelector('#ready').textContent.includes('Ready')",
    "/dashboard": "document.querySelectorAll('#workers tbody tr').length == 6"
    " && document.querySelectorAll('#requests tbody tr').length > 3"
    " && document.querySelector('#lanes .runs rect') && document.querySelector('.uplot')"
    " && document.querySelector('#transfers .cut') && document.querySelector('#strip .mark')",
    "/docs": "document.querySelector('details')",
    "/play": "document.querySelector('[name=model]').value == 'tiny'",
}
LOOKS = {
    "light": {"width": 1280, "height": 900},
    "dark": {"width": 1280, "height": 900, "dark": True},
    "phone": {"width": 390, "height": 844, "phone": True},
}
# Elements with text of their own that is cut off or reaches beyond the edge of its section.
CUT = """
[...document.querySelectorAll('main *, header *')].filter((each) => {
  const own = [...each.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
  if (!own || !each.offsetParent) return false;
  if (each.closest('.scroll, .u-legend, textarea, option')) return false;
  const hides = getComputedStyle(each).overflow === 'hidden';
  const { left, right, width } = each.getBoundingClientRect();
  const edge = each.closest('section, .canary, form')?.getBoundingClientRect().right ?? innerWidth;
  return (hides && each.scrollWidth > each.clientWidth + 1)
    || (right > edge + 1 && left >= 0 && width > 0);
}).map((each) => each.outerHTML.slice(0, 120))
"""


@pytest.fixture(scope="module")
def tabs():
    with shared_browser() as found:
        yield found


@pytest.fixture(scope="module")
def pools():
    return ShownPools()


@pytest.fixture(scope="module")
def url(pools):
    with shown(pools) as address:
        yield address


@pytest.fixture(scope="module")
def axe(tmp_path_factory):
    """Returns the source of axe-core, from npm."""
    folder = tmp_path_factory.mktemp("axe")
    command = ["npm", "pack", "--silent", AXE]
    try:
        packed = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"needs npm: {error}")
    if packed.returncode:
        pytest.skip(f"npm has no {AXE}: {packed.stderr[-200:]}")
    with tarfile.open(folder / packed.stdout.strip().splitlines()[-1]) as archive:
        return archive.extractfile("package/axe.min.js").read().decode()


def dashboard(tabs, url):
    return tabs.looking(f"{url}/dashboard", SEEN["/dashboard"])


async def picture(page, look, name):
    """Saves a picture of the whole page, if a person has requested pictures."""
    if not (shots := os.environ.get("BATON_TEST_SHOTS")):
        return
    height = await page.run("document.documentElement.scrollHeight")
    await page.look(**{**look, "height": height})
    await asyncio.to_thread((Path(shots) / f"{name}.png").write_bytes, await page.picture())
    await page.look(**look)


def test_pages_work_fit_and_can_be_used_by_all_in_every_look(tabs, url, axe):
    async def check():
        async with tabs.blank() as page:
            for path, seen in SEEN.items():
                await page.look(**LOOKS["light"])
                await page.open(url + path)
                await page.until(seen)
                await page.run(f"{axe}; undefined")
                for name, look in LOOKS.items():
                    await page.look(**look)
                    width = await page.run("document.documentElement.scrollWidth")
                    assert width <= look["width"], f"{path} is too wide in the look {name}"
                    if path != "/docs":
                        assert await page.run(CUT) == [], f"{path} in the look {name}"
                    found = await page.run(
                        f"axe.run(document, {RULES}).then((all) => all.violations.map((each) =>"
                        " `${each.id}: ${each.nodes.map((node) => node.html.slice(0, 160))}`))"
                    )
                    assert found == [], f"{path} in the look {name}: {found}"
                    await picture(page, look, f"{path.strip('/') or 'landing'}-{name}")

    tabs.run(check())


def test_death_decision_severed_pair_and_canary_are_shown_with_their_reasons(tabs):
    pools = ShownPools()  # new pools, because lanes show only the last seconds

    def marks(kind):
        labels = f"[...document.querySelectorAll('#strip .mark[aria-label^={kind}]')]"
        return f"{labels}.map((each) => each.getAttribute('aria-label')).join('\\n')"

    async def check():
        with shown(pools) as url:
            async with dashboard(tabs, url) as page:
                await look(page)

    async def look(page):
        state = await page.run("document.querySelector('#tiles div[data-kind=bad]').innerText")
        assert "Degraded" in state
        assert "no worker of 1" in state
        deaths = await page.run(marks("death"))
        assert f"{pools.dead} (prefill) ended. it is started again in 1 s" in deaths
        assert "did not start: no space left on device" in deaths
        decisions = await page.run(marks("planner"))
        assert "planner (on) prefill 2 → 3, decode 2 → 1: done. prefill needs" in decisions
        await page.run("document.querySelector('#lane-span').value = '60'")
        await page.until("document.querySelectorAll('#lanes .lane-event').length > 1")
        row = (
            "[...document.querySelectorAll('#workers tbody tr')].find((each) => "
            f"each.textContent.startsWith('{pools.dead}')).textContent"
        )
        assert "3 failures, crash-looping" in await page.run(row)
        assert "no space left on device" in await page.run(row)
        assert "no space" in await page.run("document.querySelector('#troubles').innerText")
        severed = await page.run("document.querySelector('#severed').textContent")
        roles = pools.roles.items()
        sources = [name for name, role in roles if role is Role.PREFILL]
        sink = next(name for name, role in roles if role is Role.DECODE)
        assert f"{sources[1]} → {sink}" in severed
        assert "severed" in await page.run("document.querySelector('#transfers .cut').innerText")
        planner = await page.run("document.querySelector('#planner-reasons').innerText")
        assert "prefill 2 → 3, decode 2 → 1: done" in planner
        canary = await page.run("document.querySelector('#canary').innerText")
        assert "v2 takes over: too few requests to judge. It has 5 %" in canary
        assert "then 50 %, then all" in canary

    tabs.run(check())


# A muted page gets no events, and the test can set the time of the page.
MUTING = """
  const real = window.fetch;
  window.fetch = async (...asked) => {
    const answer = await real(...asked);
    if (asked[0] !== '/dashboard/events') return answer;
    const mute = new TransformStream({
      transform(piece, out) { if (!window.muted) out.enqueue(piece); },
    });
    return new Response(answer.body.pipeThrough(mute), answer);
  };
  const now = performance.now.bind(performance);
  window.ahead = 0;
  performance.now = () => now() + window.ahead;
"""


def test_silent_gateway_is_distinguished_from_an_idle_one(tabs, url):
    async def check():
        async with tabs.blank() as page:
            await page.call("Page.addScriptToEvaluateOnNewDocument", source=MUTING)
            await page.open(f"{url}/dashboard")
            await page.until(SEEN["/dashboard"])
            assert await page.run("document.querySelector('#state').textContent") == "live"
            await page.run("window.muted = true; window.ahead = 6000")
            told = await page.until(
                "document.body.classList.contains('stale')"
                " && document.querySelector('#notice').textContent"
            )
            assert "The gateway has said nothing for" in told
            assert "What is shown is from" in told
            await page.run("window.muted = false")
            await page.until("document.querySelector('#state').textContent == 'live'")
            assert not await page.run("document.body.classList.contains('stale')")

    tabs.run(check())


def test_a_request_shows_data_as_text(tabs, url):
    async def check():
        async with dashboard(tabs, url) as page:
            await page.run(
                "[...document.querySelectorAll('#requests tbody tr')]"
                ".find((each) => each.textContent.includes('finished'))"
                ".querySelector('button').click()"
            )
            text = await page.until("document.querySelector('dialog')?.innerText")
            assert "least TTFT <b>of all</b>" in text
            assert "missed its bound at" in text.lower()
            assert "(chosen)\t1.50 s\t200 ms\t2" in text

    tabs.run(check())
