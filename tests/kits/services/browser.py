"""A headless Chromium from Debian's package, driven by aiohttp over its DevTools protocol.

Protocol: https://chromedevtools.github.io/devtools-protocol/.
"""

import asyncio
import base64
import itertools
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome")
START_S = 60.0
CALL_S = 60.0
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--no-proxy-server",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)


def chromium() -> str | None:
    """Returns the path of the browser, or None if there is no browser."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One browser tab."""

    def __init__(self, browser: "Browser", session: str, context: str) -> None:
        self._browser = browser
        self._session = session
        self._context = context
        self._never = asyncio.get_running_loop().create_future()
        self.complaints: list[str] = []  # exceptions, errors and violations of the content policy

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return await self._browser.call(method, parameters, self._session)

    def record(self, method: str, parameters: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            thrown = details.get("exception", {}).get("description", details["text"])
            self.complaints.append(thrown)
        elif method == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            entry = parameters["entry"]
            self.complaints.append(f"{entry['text']} {entry.get('url', '')}")
        elif method == "Runtime.consoleAPICalled" and parameters["type"] == "error":
            self.complaints.append(str(parameters["args"]))

    async def close(self) -> None:
        """Closes the tab."""
        await self._browser.call(
            "Target.disposeBrowserContext", {"browserContextId": self._context}
        )

    async def open(self, url: str) -> None:
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def look(
        self, *, width: int = 1280, height: int = 900, dark: bool = False, phone: bool = False
    ) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=phone,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def run(self, script: str) -> Any:
        """Returns the value of a JavaScript expression; awaits a promise."""
        answer = await self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def until(self, script: str, timeout_s: float = 60.0) -> Any:
        """Waits until an expression is true, and returns its value."""
        try:
            async with asyncio.timeout(timeout_s):
                # DOM elements cannot be encoded as JSON.
                found = f"((it) => it instanceof Node ? true : it)({script})"
                while not (value := await self.run(found)):
                    await asyncio.wait([self._never], timeout=0.05)
                return value
        except TimeoutError:
            text = await self.run("document.body.innerText")
            raise AssertionError(f"never true: {script}\n{self.complaints}\n{text}") from None

    async def press(self, key: str) -> None:
        code = {"Enter": 13, "Tab": 9, "Escape": 27}.get(key, 0)
        text = {"text": "\r"} if key == "Enter" else {"text": key} if len(key) == 1 else {}
        named = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        await self.call("Input.dispatchKeyEvent", type="keyDown", **named, **text)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **named)

    async def picture(self) -> bytes:
        """Returns a PNG of the visible page."""
        shot = await self.call("Page.captureScreenshot", format="png")
        return base64.b64decode(shot["data"])


class Browser:
    """A connection to the browser."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._pages: dict[str, Page] = {}

    async def page(self) -> Page:
        """Opens a tab that shares no cookies or storage with other tabs."""
        context = await self.call("Target.createBrowserContext", {})
        target = await self.call(
            "Target.createTarget",
            {"url": "about:blank", "browserContextId": context["browserContextId"]},
        )
        attached = await self.call(
            "Target.attachToTarget", {"targetId": target["targetId"], "flatten": True}
        )
        page = Page(self, attached["sessionId"], context["browserContextId"])
        self._pages[attached["sessionId"]] = page
        for domain in ("Page", "Runtime", "Log"):
            await page.call(f"{domain}.enable")
        return page

    async def call(
        self, method: str, parameters: dict[str, Any], session: str | None = None
    ) -> dict[str, Any]:
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        await self._socket.send_json(message)
        try:
            return await asyncio.wait_for(answer, CALL_S)
        finally:
            del self._answers[number]

    async def listen(self) -> None:
        """Delivers replies and events until the connection closes."""
        async for message in self._socket:
            told = message.json()
            answer = self._answers.get(told.get("id"))
            if answer is not None and not answer.done():
                if "error" in told:
                    answer.set_exception(AssertionError(told["error"]))
                else:
                    answer.set_result(told["result"])
            elif (page := self._pages.get(told.get("sessionId"))) is not None:
                page.record(told["method"], told["params"])


@asynccontextmanager
async def browsing() -> AsyncIterator[Browser]:
    """Starts a browser and closes it at the end of the block."""
    path = chromium()
    assert path is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        process = await asyncio.create_subprocess_exec(
            path,
            *FLAGS,
            f"--user-data-dir={directory}",
            "about:blank",
            stderr=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
        )
        try:
            url = await asyncio.wait_for(_address(process.stderr), START_S)
            drain = asyncio.create_task(_drain(process.stderr))
            async with (
                aiohttp.ClientSession() as session,
                session.ws_connect(url, max_msg_size=0) as socket,
            ):
                browser = Browser(socket)
                listening = asyncio.create_task(browser.listen())
                yield browser
                listening.cancel()
                await asyncio.gather(listening, return_exceptions=True)
            drain.cancel()
            await asyncio.gather(drain, return_exceptions=True)
        finally:
            if process.returncode is None:
                process.terminate()
                try:
                    await asyncio.wait_for(process.wait(), 10.0)
                except TimeoutError:
                    process.kill()
                    await process.wait()


class Tabs:
    """Opens tabs of one browser for tests that each run in the same event loop."""

    def __init__(self, runner: asyncio.Runner, browser: Browser) -> None:
        self.run = runner.run
        self._browser = browser

    @asynccontextmanager
    async def blank(self) -> AsyncIterator[Page]:
        """Opens a blank tab. Asserts at the end that the tab has no complaints."""
        page = await self._browser.page()
        await page.look()
        yield page
        assert page.complaints == []
        await page.close()

    @asynccontextmanager
    async def looking(self, url: str, seen: str) -> AsyncIterator[Page]:
        """Opens a tab on a page, and waits until `seen` is true."""
        async with self.blank() as page:
            await page.open(url)
            await page.until(seen)
            yield page


@contextmanager
def shared_browser() -> Iterator[Tabs]:
    """Starts a browser for several tests."""
    with asyncio.Runner() as runner:
        opened = browsing()
        tabs = Tabs(runner, runner.run(opened.__aenter__()))
        try:
            yield tabs
        finally:
            runner.run(opened.__aexit__(None, None, None))


async def _address(stderr: Any) -> str:
    while line := (await stderr.readline()).decode():
        if line.startswith("DevTools listening on "):
            return line.removeprefix("DevTools listening on ").strip()
    raise AssertionError("the browser has ended")


async def _drain(stderr: Any) -> None:
    while await stderr.read(65536):
        pass
