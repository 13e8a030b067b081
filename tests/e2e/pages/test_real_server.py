"""The web pages with a real server: an operator's order on a page changes no token."""

import os
import signal
from contextlib import ExitStack

import pytest

from tests.kits.operator import Trickle
from tests.kits.services.browser import chromium, shared_browser
from tests.kits.services.served import HTTP, serve

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(chromium() is None, reason="needs Debian's package chromium"),
]

KEY = "an admin key"
LISTED = (
    "document.querySelectorAll('#workers tbody tr').length == 3"
    " && document.querySelectorAll('#requests tbody tr').length > 0"
    " && document.querySelector('#order-forms form')"
)


FAULT = "document.querySelector('.msg.fault')?.innerText"


async def ask_there(page):
    """Sends the prompt of the playground's field, with optional other fields."""
    await page.run(
        "document.querySelector('#prompt').value ||= 'again';"
        "document.querySelector('#ask').requestSubmit()"
    )


@pytest.fixture(scope="module")
def tabs():
    with shared_browser() as found:
        yield found


@pytest.fixture(scope="module")
def server(lent):
    options = ("--launcher", "process", "--prefill", "1", "--decode", "2")
    with serve(*options, command=lent, BATON_ADMIN__KEY=KEY) as served:
        ask(served.url, 8)
        yield served


def ask(url, max_tokens):
    body = {"prompt": "import os\n", "max_tokens": max_tokens, "temperature": 0}
    body |= {"ignore_eos": True, "model": "baton-bundled"}
    answer = HTTP.post(f"{url}/v1/completions", json=body, timeout=60)
    return answer.json()["choices"][0]["text"]


def pid_of(server, name):
    workers = f"{server.url}/dashboard/orders/v1/workers"
    answer = HTTP.get(workers, headers={"x-baton-admin-key": KEY})
    return next(each["pid"] for each in answer.json()["workers"] if each["worker_id"] == name)


def test_a_flip_from_the_page_changes_no_token_of_running_streams(tabs, server):
    async def check():
        async with tabs.blank() as page:
            await page.open(server.url + "/dashboard")
            await page.run(f"sessionStorage.setItem('baton.admin', '{KEY}')")
            await page.until(LISTED)
            row = (
                "[...document.querySelectorAll('#workers tbody tr')]"
                ".find((each) => each.textContent.startsWith('worker-2'))"
            )
            await page.run(f"[...{row}.querySelectorAll('button')][0].click()")
            await page.run("document.querySelector('dialog [value=prefill]').click()")
            await page.until("document.querySelector('dialog #confirm')")
            shown = await page.run("document.querySelector('dialog').innerText")
            assert "tell worker-2 to become prefill" in shown
            await page.press("Enter")  # the send button has the focus
            await page.until(f"{row}.children[1].textContent == 'prefill'")
            await page.until("document.querySelector('#events').textContent.includes('worker-2')")

    with ExitStack() as clients:
        streams = [clients.enter_context(Trickle(server.url)) for _ in range(2)]
        tabs.run(check())
    for stream in streams:
        stream.check()
    assert len({stream.answers[0] for stream in streams}) == 1


@pytest.mark.long  # test_looks checks the same page with a pool machine
def test_a_worker_that_was_killed_is_seen_to_die_and_to_come_back(tabs, server):
    async def check():
        async with tabs.looking(server.url + "/dashboard", LISTED) as page:
            await page.run("document.querySelector('#worker-filter').value = 'worker-1'")
            row = "document.querySelector('#workers tbody tr')"
            await page.until(f"{row}?.textContent.startsWith('worker-1')")
            os.kill(pid_of(server, "worker-1"), signal.SIGKILL)
            label = await page.until(
                "document.querySelector('#strip .mark[aria-label^=death]')"
                "?.getAttribute('aria-label')"
            )
            assert "worker-1" in label
            state = "document.querySelector('#tiles dd').textContent"
            await page.until(f"{state} == 'Limited' || {state} == 'Degraded'")
            await page.until(f"/[1-9] failure/.test({row}.textContent)")
            await page.until(f"{row}.children[2].textContent.startsWith('serving for')")
            await page.until("document.querySelector('#state').textContent == 'live'")

    tabs.run(check())


def test_the_playground_streams_tokens_with_probabilities_and_a_timeline(tabs, server):
    async def check():
        async with tabs.blank() as page:
            await page.open(server.url + "/play")
            await page.until("document.querySelector('[name=model]').value == 'baton-bundled'")
            await page.run(
                "document.querySelector('[name=logprobs]').checked = true;"
                "document.querySelector('[name=max_tokens]').value = 12;"
                "document.querySelector('#prompt').value = '<b>bold</b>';"
            )
            await ask_there(page)
            await page.until("document.querySelectorAll('.tok').length > 3")
            await page.until("document.querySelector('#timeline svg')")
            assert await page.run("document.querySelector('.msg.user b')") is None
            await page.run("document.querySelector('.tok').focus()")
            assert "%" in await page.run("document.querySelector('#tip').textContent")
            await page.press("ArrowRight")  # all tokens of an answer are a single Tab stop
            second = "document.activeElement === document.querySelectorAll('.tok')[1]"
            assert await page.run(second)
            assert await page.run("document.querySelectorAll('.tok[tabindex=\"0\"]').length") == 1
            await page.run("document.querySelector('[name=schema]').value = '{'")
            await ask_there(page)
            assert "Schema is no JSON" in await page.until(FAULT)
            await page.run("document.querySelector('[name=schema]').value = '{\"type\": 3}'")
            await page.run("document.querySelector('.fault button').click()")
            assert "The server refuses" in await page.until(
                f"{FAULT} && !{FAULT}.includes('no JSON') && {FAULT}"
            )
            assert all("400" in each for each in page.complaints)
            page.complaints.clear()

    tabs.run(check())
