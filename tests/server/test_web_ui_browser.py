"""The page at ``/ui`` in a headless Chromium, if there is one with selenium: ``pip install selenium``."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from scripted import ScriptedEngine
from serving import Server, serving, until

webdriver = pytest.importorskip("selenium.webdriver")
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and its driver")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1280,800",
)
ENTER, ESCAPE = "\ue007", "\ue00c"
TOOL = '[{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]'


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


class Page:
    """The page of a server; each call waits for the browser in a thread."""

    def __init__(self, browser: Any, server: Server) -> None:
        self.browser, self.server = browser, server

    async def open(self, fragment: str = "") -> None:
        await self.call(self.browser.get, f"{self.server.url}/ui{fragment}")
        await self.js("localStorage.clear(); sessionStorage.clear();")
        await self.call(self.browser.refresh)
        await self.shows("#model option")

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.to_thread(function, *args)

    async def js(self, script: str, *args: Any) -> Any:
        return await self.call(self.browser.execute_script, script, *args)

    async def type(self, selector: str, text: str) -> None:
        node = await self.call(self.browser.find_element, "css selector", selector)
        await self.call(node.send_keys, text)

    async def click(self, selector: str) -> None:
        await self.js("document.querySelector(arguments[0]).click()", selector)

    async def texts(self, selector: str) -> list[str]:
        script = "return [...document.querySelectorAll(arguments[0])].map(node => node.textContent)"
        return list(await self.js(script, selector))

    async def shows(self, selector: str, text: str = "") -> None:
        try:
            async with asyncio.timeout(20):
                while not any(text in found for found in await self.texts(selector)):
                    await asyncio.sleep(0.02)
        except TimeoutError:
            pytest.fail(f"no {selector} with {text!r} in {await self.texts('main, dialog[open]')}")

    async def ask(self, text: str) -> None:
        await self.type("#prompt", text + ENTER)

    async def check(self) -> None:
        """Nothing went wrong in the page, and its policy refused nothing."""
        assert await self.call(self.browser.get_log, "browser") == []


async def test_an_answer_streams_in_with_its_speed(browser: Any) -> None:
    text = ["# Title\n", "Some **bold** and `code`.\n", "- one\n- two\n", "```py\nprint(1)\n```\n"]
    engine = ScriptedEngine(text=text)
    async with serving(engine) as server:
        page = Page(browser, server)
        await page.open()
        await page.ask("hello")
        await page.shows(".assistant .meta", "first token")
        assert await page.texts(".user .body") == ["hello"]
        assert await page.texts(".assistant h3") == ["Title"]
        assert await page.texts(".assistant strong") == ["bold"]
        assert await page.texts(".assistant li") == ["one", "two"]
        assert await page.texts(".assistant pre code") == ["print(1)"]
        assert "tokens" in (await page.texts(".assistant .meta"))[0]
        await page.call(browser.refresh)  # the conversation stays
        await page.shows(".assistant li", "two")
        await page.check()


async def test_what_a_model_writes_is_only_text(browser: Any) -> None:
    evil = (
        "<img src=x onerror=\"document.title='evil'\"><script>document.title='evil'</script>\n"
        "[a](javascript:alert(1)) ![i](http://127.0.0.1:9/leak.png) **<b>x</b>**\n"
    )
    async with serving(ScriptedEngine(text=[evil])) as server:
        page = Page(browser, server)
        await page.open()
        await page.ask("<b>hello</b>")
        await page.shows(".assistant .meta", "first token")
        nodes = "#messages img, #messages script, #messages b, #messages a[href^=javascript]"
        assert await page.texts(nodes) == []
        assert await page.js("return document.title") == "treadle"
        assert await page.texts(".user .body") == ["<b>hello</b>"]
        await page.check()


async def test_escape_stops_the_answer(browser: Any) -> None:
    engine = ScriptedEngine(text=["word "] * 900, pause=0.02)
    async with serving(engine) as server:
        page = Page(browser, server)
        await page.open()
        await page.ask("hello")
        await page.shows(".assistant .body", "word")
        await page.type("body", ESCAPE)
        await page.shows(".assistant .meta", "ended by stopped")
        await until(lambda: engine.aborted == 1)
        assert await page.texts("#send") == ["Send"]
        await page.check()


async def test_reasoning_is_folded_and_calls_are_shown(browser: Any) -> None:
    text = ["<think>", "a riddle", "</think>", "Let me see."]
    text += ["<tool_call>", '{"name": "look", "arguments": {"at": 1}}', "</tool_call>"]
    engine = ScriptedEngine(text=text)
    parsers = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    async with serving(engine, **parsers) as server:
        page = Page(browser, server)
        await page.open()
        await page.js("document.querySelector('[name=tools]').value = arguments[0]", TOOL)
        await page.ask("hello")
        await page.shows(".call strong", "look")
        await page.shows(".assistant .meta", "first token")
        assert await page.texts("details:not([hidden]) div") == ["a riddle"]
        assert await page.js("return document.querySelector('details:not([hidden])').open") is False
        assert '"at": 1' in (await page.texts(".call pre"))[0]
        await page.ask("it is a cat")  # the result of the call
        await page.shows(".tool .body", "it is a cat")
        await page.shows(".message:nth-child(4) .meta", "first token")
        await page.check()


async def test_settings_become_parameters_and_wrong_ones_are_shown(browser: Any) -> None:
    engine = ScriptedEngine()
    async with serving(engine) as server:
        page = Page(browser, server)
        await page.open()
        await page.type("[name=temperature]", "0.4")
        await page.type("[name=max_tokens]", "3")
        await page.js("document.querySelector('[name=tools]').value = '[{'")
        await page.ask("hello")
        await page.shows("#settings-error", "not JSON")
        assert engine.params is None and await page.texts(".message") == []
        await page.js("document.querySelector('[name=tools]').value = ''")
        await page.type("#prompt", ENTER)
        await page.shows(".assistant .meta", "first token")
        assert engine.params is not None
        assert (engine.params.temperature, engine.params.max_tokens) == (0.4, 3)
        await page.check()


async def test_an_error_of_the_server_is_shown(browser: Any) -> None:
    async with serving() as server:
        page = Page(browser, server)
        await page.open()
        await page.js("document.querySelector('[name=tools]').value = '[1]'")
        await page.ask("hello")
        await page.shows(".assistant .error", "tools")
    await page.call(browser.get_log, "browser")  # the browser notes the status


async def test_a_key_is_asked_for_once(browser: Any) -> None:
    async with serving(api_key=["secret"]) as server:
        page = Page(browser, server)
        await page.call(browser.get, server.url)  # sent on to the page
        await page.js("sessionStorage.clear()")
        await page.call(browser.refresh)
        async with asyncio.timeout(20):
            while not await page.js("return document.getElementById('key-dialog').open"):
                await asyncio.sleep(0.02)
        await page.type("#key", "secret" + ENTER)
        await page.shows("#model option", "scripted")
        await page.ask("hello")
        await page.shows(".assistant .body", "Hello world")
    await page.call(browser.get_log, "browser")  # the browser notes the refusals


async def test_the_engine_page_counts_what_happens(browser: Any) -> None:
    async with serving() as server:
        page = Page(browser, server)
        await page.open()
        await page.ask("hello")
        await page.shows(".assistant .meta", "first token")
        await page.click("#tab-engine")
        await page.shows("#engine-state", "scripted: the engine answers.")
        await page.shows("#cards .card", "Time to first token")
        await page.shows("#plugins td", "server:web_ui")
        await page.check()


async def test_a_phone_has_the_whole_page(browser: Any) -> None:
    size = {"width": 360, "height": 640, "deviceScaleFactor": 1, "mobile": True}
    async with serving() as server:
        page = Page(browser, server)
        await page.call(browser.execute_cdp_cmd, "Emulation.setDeviceMetricsOverride", size)
        try:
            for fragment in ("", "#engine"):
                await page.open(fragment)
                await page.shows("#cards .card" if fragment else "#composer")
                wide = "return document.documentElement.scrollWidth - window.innerWidth"
                assert await page.js(wide) <= 0
        finally:
            await page.call(browser.execute_cdp_cmd, "Emulation.clearDeviceMetricsOverride", {})
