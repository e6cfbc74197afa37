"""The live page in a real browser: it draws, it can be used with a mouse and with keys, and it tells what is stuck."""

from __future__ import annotations

import time

import pytest

from symcomm.observe.top.model import Live
from symcomm.observe.top.page import PageServer
from symcomm.observe.top.simulate import SimulatedFeed
from tests.support.browsers import any_browser


@pytest.fixture(scope="module")
def browser():
    with any_browser() as found:
        yield found


@pytest.fixture
def visit(browser):
    """Opens the page of a simulated job; fails the test when the page complains about anything."""
    opened, complaints = [], []

    def open_page(ranks: int, theme: str = "light", width: int = 1280, **options):
        server = PageServer(Live(SimulatedFeed(ranks, **options)))
        context = browser.new_context(color_scheme=theme, viewport={"width": width, "height": 800})
        context.set_default_timeout(30_000)
        opened.append((server, context))
        tab = context.new_page()
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.on("console", lambda message: message.type == "error" and complaints.append(message.text))
        tab.on("request", lambda request: request.url.startswith(server.address) or complaints.append(request.url))
        tab.goto(server.url)
        tab.wait_for_selector("body[data-version]")
        return tab, server

    yield open_page
    for server, context in opened:
        context.close()
        server.close()
    assert not complaints


def colors_in(tab, selector: str) -> int:
    """How many different colours a canvas shows; 1 means that nothing was drawn."""
    return tab.evaluate(
        """(selector) => { const c = document.querySelector(selector), d = c.getContext('2d')
           .getImageData(0, 0, c.width, c.height).data, seen = new Set();
           for (let i = 0; i < d.length; i += 4) seen.add(d[i] << 16 | d[i + 1] << 8 | d[i + 2]); return seen.size }""",
        selector,
    )


def pixels_of(tab) -> str:
    return tab.evaluate("document.querySelector('#timeline').toDataURL()")


@pytest.mark.parametrize("ranks", [2, 1000])
def test_everything_is_drawn(visit, ranks):
    tab, _ = visit(ranks, straggler=1)
    assert tab.locator("#grid button").count() == ranks
    assert colors_in(tab, "#timeline") > 5 and colors_in(tab, "#heat") > 3
    assert tab.inner_text("#tiles").startswith(f"Ranks\n{ranks:,}")
    assert "rank 1" in tab.inner_text("#worst") and "all_reduce" in tab.inner_text("#numbers")
    assert tab.is_hidden("#banner") and "world" in tab.inner_text("#groups")
    assert "token" not in tab.url  # it does not stay where others may read it


def test_it_goes_on(visit):
    tab, _ = visit(4)
    before = int(tab.get_attribute("body", "data-version"))
    tab.wait_for_selector(f"body:not([data-version='{before}'])")
    tab.click("#pause")
    time.sleep(0.8)
    frozen = tab.get_attribute("body", "data-version")
    time.sleep(1.2)
    assert tab.get_attribute("body", "data-version") == frozen and tab.inner_text("#pause") == "Resume"


def test_wheel_drag_and_hover(visit):
    tab, _ = visit(8)
    tab.click("#pause")
    box = tab.locator("#timeline").bounding_box()
    middle = (box["x"] + box["width"] * 0.6, box["y"] + box["height"] * 0.4)
    pictures = {pixels_of(tab)}
    tab.mouse.move(*middle)
    tab.mouse.wheel(0, -400)
    time.sleep(0.2)
    pictures.add(pixels_of(tab))
    assert tab.get_attribute("#follow", "aria-pressed") == "false"
    tab.mouse.down()
    tab.mouse.move(middle[0] + 150, middle[1], steps=4)
    tab.mouse.up()
    time.sleep(0.2)
    pictures.add(pixels_of(tab))
    assert len(pictures) == 3, "zooming and moving change the picture"
    for step in range(60):  # somewhere along a rank's row there is an operation
        tab.mouse.move(box["x"] + 60 + step * 18, middle[1])
        text = tab.inner_text("#tip")
        if "#" in text:
            break
    assert ("rank 3" in text and "KiB" in text) or "MiB" in text or " B" in text
    tab.dblclick("#timeline")
    assert tab.get_attribute("#follow", "aria-pressed") == "true"


def test_keys(visit):
    tab, _ = visit(40)
    tab.focus("#grid button")
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("Enter")
    assert tab.inner_text("#h-rank") == "Rank 2"
    assert tab.get_attribute("#grid button:nth-child(3)", "aria-pressed") == "true"
    assert "rank 2" in tab.get_attribute("#grid button:nth-child(3)", "aria-label")
    tab.focus("#timeline")
    tab.keyboard.press("ArrowLeft")
    assert tab.get_attribute("#follow", "aria-pressed") == "false"
    tab.keyboard.press("Home")
    assert tab.get_attribute("#follow", "aria-pressed") == "true"
    tab.click("#asTable summary")
    tab.wait_for_selector("#recent tr:nth-child(10)")
    assert "40 of 40" in tab.inner_text("#recent")


def test_a_stuck_rank(visit, tmp_path):
    tab, _ = visit(100, stuck=61, straggler=7, stuck_after=-8)
    tab.wait_for_selector("#banner:not([hidden])")
    assert "rank 61 has not called" in tab.inner_text("#banner") and tab.get_attribute("#banner", "role") == "alert"
    assert tab.title().startswith("Stuck: ")
    tab.click("#show")
    tab.click("#stacks")
    tab.wait_for_selector("#stack:has-text('next_batch')")
    assert tab.get_attribute("#grid button:nth-child(62)", "class") == "late"
    tab.click("#load")
    tab.wait_for_selector("#keys:has-text('epoch')")
    picture = tab.screenshot(path=str(tmp_path / "stuck.png"), full_page=True)
    assert len(picture) > 20_000


def test_commands_in_a_verdict_are_set_as_code(visit):
    tab, _ = visit(2)
    tab.click("#pause")
    sentence = "rank 1 (pid 7) is stopped after barrier #1 (world); `kill -CONT 7` lets it go on."
    tab.evaluate(
        "(sentence) => showVerdict({ ...job.last, verdict: { kind: 'stopped', sentence, ranks: [1] } })", sentence
    )
    assert tab.inner_text("#banner p") == sentence.replace("`", "") and tab.inner_text("#banner code") == "kill -CONT 7"


def test_speed_can_be_read_on_a_phone(visit):
    """All figures are inside the window, each with its head, and none is cut off."""
    tab, _ = visit(4, width=420)
    tab.click("#pause")  # or rows are replaced while they are looked at
    row = tab.locator("#numbers tr").first
    assert row.locator("td").count() == 9
    heads = [row.locator("td").nth(i).get_attribute("data-head") for i in range(9)]
    assert heads == ["Collective", "Up to", "Times", "p50", "p90", "p99", "Waited before", "Direct", "Bandwidth"]
    for i in range(9):
        box = row.locator("td").nth(i).bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= 420, (heads[i], box)
    cut = "[...document.querySelectorAll('#numbers td')].filter((td) => td.scrollWidth > td.clientWidth + 1).length"
    assert tab.evaluate(cut) == 0 and tab.evaluate("document.documentElement.scrollWidth") <= 420


def test_straggler_rows_of_two_ranks(visit):
    tab, _ = visit(2, straggler=1)
    tab.wait_for_selector("#worst tr:has-text(' of ')")
    assert tab.inner_text("#h-waited") == "The other waited"
    assert "rank 1" in tab.inner_text("#worst tr") and "the other waited" in tab.inner_text("#tiles")
    even, _ = visit(2)
    assert "nobody stands out" in even.inner_text("#tiles")
    assert "Last did" in even.inner_text("#facts")


@pytest.mark.parametrize(
    ("ranks", "theme", "width", "trouble"),
    [(2, "light", 420, {}), (2, "dark", 1280, {}), (40, "light", 1280, {"stuck": 3}), (40, "dark", 420, {"stuck": 3})],
)
def test_axe_finds_nothing(visit, ranks, theme, width, trouble):
    """Names for screen readers, contrast of colours, what keys can reach: the rules of axe-core, on all that can be
    unfolded."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    tab, _ = visit(ranks, theme, width, straggler=1, **trouble, **({"stuck_after": -8} if trouble else {}))
    if trouble:
        tab.wait_for_selector("#banner:not([hidden])")
    for button in ("#pause", "#asTable summary", "#load", "#stacks"):
        tab.click(button)
    tab.wait_for_selector("#stack:has-text('train.py')")
    found = axe.Axe().run(tab).response["violations"]
    said = [(rule["id"], node["target"], node["failureSummary"]) for rule in found for node in rule["nodes"]]
    assert not said


def test_every_control_is_reached_with_tab_and_seen_to_be(visit):
    tab, _ = visit(4, stuck=2, stuck_after=-8)
    tab.wait_for_selector("#banner:not([hidden])")
    tab.keyboard.press(" ")
    assert tab.inner_text("#pause") == "Resume"
    reached = {}  # name -> how its outline is drawn
    for _ in range(40):
        tab.keyboard.press("Tab")
        name, outline = tab.evaluate(
            """() => { const e = document.activeElement, style = getComputedStyle(e);
               return [e.id || e.getAttribute('aria-label') || e.textContent, style.outlineStyle]; }"""
        )
        if tab.evaluate("document.activeElement === document.body") or name in reached:
            break
        reached[name] = outline
    controls = {"pause", "theme", "show", "follow", "timeline", "stacks", "load", "Speed", "Groups"}
    assert controls <= set(reached) and any(name.startswith("rank 0") for name in reached), reached
    assert not [name for name, outline in reached.items() if outline == "none"]


def test_light_and_dark(visit):
    tab, _ = visit(3, theme="dark")
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = tab.evaluate(ground)
    tab.click("#theme")
    assert tab.inner_text("#theme") == "Theme: light" and tab.evaluate(ground) != dark
    tab.click("#theme")
    assert tab.inner_text("#theme") == "Theme: dark" and tab.evaluate(ground) == dark


def test_a_wrong_token_is_said(browser):
    with PageServer(Live(SimulatedFeed(2))) as server:
        context = browser.new_context()
        tab = context.new_page()
        tab.goto(server.address + "#token=wrong")
        tab.wait_for_selector("#health:has-text('the token is missing or wrong')", timeout=20_000)
        context.close()
