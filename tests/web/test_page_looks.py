"""The page for everybody: phones, the dark, keyboards, screen readers, another language."""

from __future__ import annotations

import threading

import pytest

PHONE = {"viewport": {"width": 360, "height": 740}, "device_scale_factor": 2, "is_mobile": True, "has_touch": True}
WIDE = "A table:\n\n| " + " | ".join(f"column {i}" for i in range(12)) + " |\n|" + "--|" * 12 + "\n\n```text\n" + "x" * 400 + "\n```\n\n" + "https://example.org/" + "y" * 200


def ground(tab) -> int:
    """How bright the page's ground is, 0 to 255."""
    return int(tab.page.evaluate("getComputedStyle(document.body).backgroundColor").split("(")[1].split(",")[0])


def violations(tab, axe) -> list[str]:
    """What axe-core complains about. It is put in by the debugger, which the page's policy does not bind."""
    tab.page.evaluate(axe.read_text() + "\n;0")
    found = tab.page.evaluate("axe.run(document, {resultTypes: ['violations']}).then((r) => r.violations)")
    return [f"{v['id']}: {node['html'][:200]} {node['failureSummary'][:300]}" for v in found for node in v["nodes"]]


def test_a_phone_shows_one_thing_at_a_time_and_nothing_sticks_out(open_tab, fake):
    fake.answers = [[WIDE]]
    tab = open_tab(fake.url, **PHONE)
    narrow = "document.documentElement.scrollWidth <= innerWidth && document.querySelector('.scroller').scrollWidth <= innerWidth"
    assert tab.page.evaluate(narrow)
    tab.page.tap("#composer")
    tab.page.fill("#composer", "Wide?")
    tab.button("Send").tap()
    tab.answered("column 3")
    assert tab.page.evaluate(narrow)
    assert tab.page.locator("#composer").bounding_box()["y"] < 740
    assert float(tab.page.evaluate("getComputedStyle(document.getElementById('composer')).fontSize").removesuffix("px")) >= 16  # or phones zoom in
    menu = tab.button("Show the list of conversations")
    assert min(menu.bounding_box()["width"], menu.bounding_box()["height"]) >= 36
    menu.tap()
    entry = tab.page.locator(".list li a")
    entry.wait_for()
    tab.page.locator(".shade").tap(position={"x": 350, "y": 400})
    entry.wait_for(state="hidden")
    tab.button("Settings of this conversation").tap()
    assert tab.page.evaluate("document.querySelector('dialog').getBoundingClientRect().width <= innerWidth")


def test_dark_and_light_follow_the_system_until_somebody_chooses(open_tab, fake):
    tab = open_tab(fake.url, color_scheme="dark")
    assert ground(tab) < 50
    tab.page.emulate_media(color_scheme="light")
    assert ground(tab) > 200
    tab.page.keyboard.press("Control+Shift+L")
    assert ground(tab) < 50
    tab.reload()
    assert ground(tab) < 50
    tab.button("Preferences").click()
    tab.page.get_by_label("Appearance").select_option("auto")
    assert ground(tab) > 200


def test_everything_can_be_done_with_the_keyboard(tab, fake):
    fake.answers = [["first"], ["begin", threading.Event()], ["edited"]]
    press, page = tab.page.keyboard.press, tab.page
    focused = "document.activeElement.getAttribute('aria-label') ?? document.activeElement.textContent"
    assert page.evaluate("document.activeElement.id") == "composer"
    page.keyboard.type("Hello")
    press("Shift+Enter")
    page.keyboard.type("there")
    press("Enter")
    tab.answered("first")
    assert fake.seen[0]["messages"][0]["content"] == "Hello\nthere"
    page.keyboard.type("More")
    press("Enter")
    page.locator(".markdown", has_text="begin").wait_for()
    press("Escape")
    tab.answered("Stopped.")
    press("Control+j")
    press("ArrowUp")
    assert page.evaluate(focused) == "Edit the message"
    press("Escape")
    tab.count(".editor", 0)
    press("Control+j")
    press("ArrowUp")
    page.keyboard.type("!")
    press("Enter")
    tab.answered("edited")
    assert fake.seen[2]["messages"][-1]["content"] == "More!"
    press("Control+Shift+O")
    tab.count(".message", 0)
    press("Control+k")
    page.locator("#search:focus").wait_for()
    page.keyboard.type("hello")
    press("Tab")
    assert page.evaluate(focused) == "Hello"  # the entry that was found
    press("Enter")
    tab.answered("edited")
    press("Control+/")
    page.get_by_role("dialog", name="Keyboard shortcuts").wait_for()
    for _ in range(8):  # the focus stays inside
        press("Tab")
        assert page.evaluate("document.activeElement === document.body || document.activeElement.closest('dialog') !== null")
    press("Escape")
    tab.count("dialog", 0)
    press("Control+b")
    assert page.locator(".sidebar").get_attribute("inert") is not None
    page.locator(".skip").focus()  # the first thing in the page
    press("Enter")
    assert page.evaluate("document.activeElement.id") == "composer"


def test_a_screen_reader_hears_when_an_answer_begins_and_ends(tab, fake):
    go = threading.Event()
    fake.answers = [["part", go, " whole"]]
    tab.ask("Hi")
    status = tab.page.locator(".app > div.away[role=status]")
    status.filter(has_text="The answer is being written").wait_for(state="attached")
    go.set()
    status.filter(has_text="The answer is complete").wait_for(state="attached")
    assert tab.page.get_by_role("article", name="You").count() == 1
    assert tab.page.get_by_role("article", name="Assistant").count() == 1
    assert tab.page.get_by_role("log", name="Messages").count() == 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(open_tab, fake, axe, scheme):
    if axe is None:
        pytest.skip("axe-core is not installed: make web (it needs npm)")
    fake.answers = [[{"reasoning": "hm"}, WIDE, {"call": ("f", "{}")}], ["half", {"finish": "length"}], ["gone", "CUT"]]
    tab = open_tab(fake.url, color_scheme=scheme, reduced_motion="reduce")
    tab.page.locator(".model").wait_for()
    assert violations(tab, axe) == []
    tab.ask("One")
    tab.answered("column")
    tab.ask("Two")
    tab.answered("half")
    tab.ask("Three")
    tab.answered("gone")
    assert violations(tab, axe) == []
    for keys in ("Control+,", "Control+/"):
        tab.page.keyboard.press(keys)
        tab.page.get_by_role("dialog").wait_for()
        assert violations(tab, axe) == []
        tab.page.keyboard.press("Escape")
        tab.count("dialog", 0)
    tab.button("Preferences").click()
    assert violations(tab, axe) == []


def test_the_page_speaks_chinese_where_the_browser_does_and_when_told(open_tab, fake):
    tab = open_tab(fake.url, locale="zh-CN")
    tab.page.locator("html[lang=zh]").wait_for()
    tab.page.fill("#composer", "你好")
    tab.page.dispatch_event("#composer", "keydown", {"key": "Enter", "isComposing": True})  # ends a word of an input method
    assert fake.seen == []
    tab.page.press("#composer", "Enter")
    tab.answered("Hello!")
    tab.button("偏好设置").click()
    tab.page.get_by_label("语言").select_option("en")
    tab.page.get_by_role("heading", name="Preferences").wait_for()
    tab.page.locator("html[lang=en]").wait_for()


def test_the_view_follows_the_answer_until_the_reader_scrolls_up(tab, fake):
    go = threading.Event()
    lines = [f"line {i}\n\n" for i in range(60)]
    fake.answers = [[*lines, go, *lines, "last"]]
    tab.ask("Long")
    tab.page.locator(".markdown p", has_text="line 59").wait_for()
    below = "(() => { const s = document.querySelector('.scroller'); return s.scrollHeight - s.scrollTop - s.clientHeight; })()"
    tab.page.locator(".markdown p", has_text="line 59").scroll_into_view_if_needed()
    assert tab.page.evaluate(below) < 60
    tab.page.mouse.move(600, 300)
    tab.page.mouse.wheel(0, -1500)
    tab.button("To the latest message").wait_for()
    before = tab.page.evaluate("document.querySelector('.scroller').scrollTop")
    go.set()
    tab.answered("last")
    assert tab.page.evaluate("document.querySelector('.scroller').scrollTop") == before
    tab.button("To the latest message").click()
    tab.count(".latest", 0)
    assert tab.page.evaluate(below) < 60
