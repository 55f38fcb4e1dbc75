"""What people do with the page, in a real browser, against scripted answers. The policy is never violated (see `open_tab`)."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from fastllm.server.page import Page

PROSE = """A **bold** word, $E = mc^2$ and a [link](https://example.org/a?b=1).

| left | right |
|:--|--:|
| a | 1 |

$$\\frac{1}{3}$$

```python
def f():
    return "x"  # why
```
"""


def test_an_answer_is_shown_as_markdown_while_it_comes(tab, fake):
    go = threading.Event()
    fake.answers = [[{"reasoning": "Let me **think**. "}, {"reasoning": "Done."}, PROSE[:40], go, *(PROSE[i : i + 9] for i in range(40, len(PROSE), 9))]]
    tab.ask("Show me")
    answer = tab.page.locator(".message.assistant")
    answer.locator("strong", has_text="bold").wait_for()
    assert tab.button("Stop").is_visible()
    assert answer.get_attribute("data-status") == "streaming"
    go.set()
    tab.answered("return")
    assert answer.locator("td.right").inner_text() == "1"
    assert answer.locator("math").count() == 2
    assert answer.locator("math[display=block] mfrac").count() == 1
    assert answer.locator(".code .hljs-keyword").first.inner_text() == "def"
    assert answer.locator("details.reasoning").get_attribute("open") is None  # folded
    answer.locator("details.reasoning summary").click()
    assert answer.locator("details.reasoning strong", has_text="think").is_visible()
    assert "12.5 tokens/s" in answer.locator(".figures").inner_text()
    assert tab.page.locator("meter").get_attribute("aria-label") == f"{100 + len(range(40, len(PROSE), 9)) + 3} of 4,096 tokens of the context are used"
    sent = fake.seen[0]
    assert sent["messages"] == [{"role": "user", "content": "Show me"}]
    assert sent["stream"] is True
    assert "temperature" not in sent


def test_code_is_copied_and_a_link_is_followed_only_after_a_question(open_tab, fake):
    fake.answers = [[PROSE]]
    tab = open_tab(fake.url, permissions=["clipboard-read", "clipboard-write"])
    tab.ask("Show me")
    answer = tab.answered("return")
    answer.locator("button.copy").click()
    tab.page.get_by_text("Copied").wait_for()
    assert tab.page.evaluate("navigator.clipboard.readText()") == 'def f():\n    return "x"  # why'
    link = answer.locator("a")
    assert link.get_attribute("rel") == "noopener noreferrer nofollow"
    link.click()
    dialog = tab.page.get_by_role("dialog")
    assert dialog.locator(".address").inner_text() == "https://example.org/a?b=1"
    tab.page.keyboard.press("Escape")
    dialog.wait_for(state="detached")
    assert tab.page.url.startswith(fake.url)
    assert not [url for url in tab.asked if not url.startswith(fake.url)]


def test_a_dialog_that_opens_as_another_closes_stays_open(tab, fake):
    """Browsers tell that a dialog has closed only some time after it."""
    fake.answers = [["[one](https://example.org/1) [two](https://example.org/2)"]]
    tab.ask("Links?")
    tab.answered("two").locator("a").first.click()
    tab.page.locator(".address", has_text="/1").wait_for()
    tab.page.evaluate("(document.querySelector('dialog').close(), document.querySelectorAll('.markdown a')[1].click())")
    tab.page.locator(".address", has_text="/2").wait_for()
    tab.page.evaluate("new Promise((done) => setTimeout(done, 100))")
    assert tab.page.evaluate("document.querySelector('dialog:modal .address').textContent") == "https://example.org/2"
    tab.page.keyboard.press("Escape")
    tab.count("dialog", 0)
    tab.button("Settings of this conversation").click()  # in an element of its own
    tab.page.get_by_role("dialog", name="Settings of this conversation").wait_for()
    tab.page.get_by_role("dialog").get_by_role("button", name="Close").click()
    tab.count("dialog", 0)
    assert tab.page.evaluate("document.activeElement.getAttribute('aria-label')") == "Settings of this conversation"


def test_copying_works_where_the_browser_has_no_clipboard_for_the_page(open_tab, fake):
    """As on pages that come from another machine without TLS."""
    fake.answers = [["[link](https://example.org/)"]]
    tab = open_tab(fake.url, before="Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    tab.ask("Hi")
    tab.answered("link").locator("a").click()
    tab.button("Copy the address").click()
    tab.page.get_by_text("Copied").wait_for()
    tab.page.focus("#composer")
    tab.page.keyboard.press("Control+v")
    assert tab.page.input_value("#composer") == "https://example.org/"


def test_stop_keeps_what_came_and_continue_goes_on_from_there(tab, fake):
    fake.answers = [["One, two,", threading.Event()], [" three."]]
    tab.ask("Count")
    tab.page.locator(".markdown", has_text="One, two,").wait_for()
    tab.button("Stop").click()
    assert fake.gone.wait(10)  # the server sees that nobody listens
    answer = tab.answered("Stopped.")
    answer.get_by_role("button", name="Continue").click()
    tab.answered("One, two, three.")
    sent = fake.seen[1]
    assert sent["continue_final_message"] is True
    assert sent["add_generation_prompt"] is False
    assert sent["messages"][-1] == {"role": "assistant", "content": "One, two,"}
    assert tab.page.get_by_text("Stopped.").count() == 0


def test_an_answer_is_written_again_and_both_versions_stay(tab, fake):
    fake.answers = [["first"], ["second"]]
    tab.ask("Say")
    tab.answered("first")
    tab.button("Write again").click()
    answer = tab.answered("second")
    assert fake.seen[1]["messages"] == fake.seen[0]["messages"]
    assert answer.locator(".versions").inner_text() == "2/2"
    tab.button("Previous version").click()
    assert tab.answered("first").locator(".versions").inner_text() == "1/2"


def test_an_edited_question_makes_a_branch_and_the_old_one_comes_back(tab, fake):
    fake.answers = [["about cats"], ["more cats"], ["about dogs"]]
    tab.ask("cats?")
    tab.answered("about cats")
    tab.ask("more?")
    tab.answered("more cats")
    tab.page.locator(".message.user").first.hover()
    tab.button("Edit").first.click()
    tab.page.get_by_label("Edit the message").fill("dogs?")
    tab.page.get_by_label("Edit the message").press("Enter")
    tab.answered("about dogs")
    assert fake.seen[2]["messages"] == [{"role": "user", "content": "dogs?"}]
    assert tab.page.locator(".message").count() == 2
    tab.button("Previous version").click()
    tab.answered("more cats")
    assert tab.page.locator(".message").count() == 4


def test_a_conversation_is_copied_up_to_an_answer(tab, fake):
    fake.answers = [["one"], ["two"]]
    tab.ask("a")
    tab.answered("one")
    tab.ask("b")
    tab.answered("two")
    tab.button("New conversation from here").first.click()
    tab.page.locator("h1", has_text="a ⑂").wait_for()
    assert tab.page.locator(".message").count() == 2
    assert tab.page.locator(".list li").count() == 2


def test_settings_are_sent_kept_and_checked(tab, fake):
    tab.page.keyboard.press("Control+,")
    temperature = tab.page.locator("#set-temperature")
    tab.page.locator('#set-temperature[placeholder="0.7"]').wait_for()  # the server's, as soon as it has told them
    tab.page.get_by_label("System prompt").fill("Be brief.")
    temperature.fill("0.2")
    tab.page.locator("#set-seed").fill("7")
    tab.page.locator("#set-top_p").fill("3")
    assert tab.page.locator("#set-top_p").get_attribute("aria-invalid") == "true"
    tab.page.get_by_text("From 0 to 1", exact=True).wait_for()
    tab.page.get_by_label("Stop at").fill("END")
    tab.page.get_by_label("Stop at").blur()
    tab.button("Use for new conversations").click()
    tab.page.keyboard.press("Escape")
    tab.ask("Hi")
    tab.answered("Hello!")
    sent = fake.seen[0]
    assert (sent["temperature"], sent["seed"], sent["stop"]) == (0.2, 7, ["END"])
    assert "top_p" not in sent
    assert sent["messages"][0] == {"role": "system", "content": "Be brief."}
    tab.reload()
    tab.page.keyboard.press("Control+,")
    assert tab.page.locator("#set-temperature").input_value() == "0.2"
    tab.button("Back to the defaults").click()
    assert tab.page.locator("#set-temperature").input_value() == ""
    tab.page.keyboard.press("Escape")
    tab.ask("Again")
    tab.page.locator(".message.assistant").nth(1).wait_for()
    tab.answered("Hello!")
    assert "seed" not in fake.seen[1]
    assert fake.seen[1]["messages"][0]["role"] == "user"
    tab.button("New chat").click()
    tab.ask("Other")
    tab.answered("Hello!")
    assert fake.seen[2]["seed"] == 7  # new conversations begin with what was kept


def test_a_model_that_can_think_has_a_switch(open_tab, fake):
    fake.template = "{% if enable_thinking %}…{% endif %}"
    tab = open_tab(fake.url)
    tab.page.locator(".model").wait_for()
    tab.button("Settings of this conversation").click()
    tab.page.get_by_label("Reasoning").select_option("false")
    tab.page.keyboard.press("Escape")
    tab.ask("Hi")
    tab.answered("Hello!")
    assert fake.seen[0]["chat_template_kwargs"] == {"enable_thinking": False}


def test_conversations_outlive_the_page_and_are_found_renamed_and_deleted(tab, fake):
    fake.answers = [["The word is zebra."], ["Something else."]]
    tab.ask("First question")
    tab.answered("zebra")
    tab.button("New chat").click()
    tab.ask("Second question")
    tab.answered("else")
    tab.reload()
    tab.answered("Something else.")  # the address names the conversation
    entries = tab.page.locator(".list li a")
    assert entries.all_inner_texts() == ["Second question", "First question"]
    tab.page.keyboard.press("Control+k")
    tab.page.locator("#search:focus").wait_for()
    tab.page.keyboard.type("ZEBRA")  # in a message, not in the title
    tab.count(".list li", 1)
    entries.click()
    tab.answered("zebra")
    tab.button("Rename: First question").click()
    tab.page.get_by_label("Title").fill("Animals")
    tab.page.keyboard.press("Enter")
    tab.page.locator("h1", has_text="Animals").wait_for()
    tab.button("Delete: Animals").click()
    tab.page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    tab.page.get_by_text("Nothing found").wait_for()
    tab.page.keyboard.press("Escape")
    tab.count(".list li", 1)
    tab.reload()
    tab.count(".list li", 1)
    assert entries.all_inner_texts() == ["Second question"]


def test_another_tab_sees_an_answer_that_is_being_written(open_tab, fake):
    go = threading.Event()
    fake.answers = [["begin", go, " and end"]]
    first = open_tab(fake.url)
    second = open_tab(fake.url, context=first.context)
    first.ask("From the first tab")
    first.page.locator(".markdown", has_text="begin").wait_for()
    second.page.locator(".list li", has_text="From the first tab").click()
    second.page.locator(".message.assistant").wait_for()
    assert second.page.get_by_text("The connection was lost.").count() == 0
    go.set()
    second.answered("begin and end")


def test_the_page_says_when_the_browser_keeps_nothing(open_tab, fake):
    tab = open_tab(fake.url, before="Object.defineProperty(window, 'indexedDB', {value: undefined})")
    tab.page.get_by_text("This browser keeps nothing for this page").wait_for()
    tab.ask("Hi")
    tab.answered("Hello!")
    tab.button("New chat").click()
    tab.page.locator(".list li a").click()
    tab.answered("Hello!")


def test_a_question_without_an_answer_is_sent_with_the_next(tab, fake):
    fake.refuse = [(500, "the engine failed", "server_error")]
    tab.ask("One")
    tab.answered("The server could not answer: the engine failed")
    tab.ask("Two")
    tab.answered("Hello!")
    assert fake.seen[1]["messages"] == [{"role": "user", "content": "One\n\nTwo"}]


def test_what_is_exported_can_be_read_and_imported(open_tab, fake, tmp_path):
    fake.answers = [[{"reasoning": "hm"}, "first"], ["second"]]
    tab = open_tab(fake.url)
    tab.ask("Question")
    tab.answered("first")
    tab.button("Write again").click()
    tab.answered("second")
    tab.button("Export: Question").click()
    with tab.page.expect_download() as download:
        tab.button("As Markdown, to read").click()
    assert Path(download.value.path()).read_text() == "# Question\n\n## User\n\nQuestion\n\n## Assistant\n\nsecond\n"
    tab.button("Preferences").click()
    with tab.page.expect_download() as download:
        tab.button("Export all").click()
    assert download.value.suggested_filename == "fastllm-conversations.json"
    data = json.loads(Path(download.value.path()).read_text())
    other = open_tab(fake.url)
    other.button("Preferences").click()
    file = tmp_path / "all.json"
    file.write_text(json.dumps(data))
    other.page.locator("dialog input[type=file]").set_input_files(file)
    other.page.get_by_text("1 conversations imported").wait_for()
    other.page.locator(".list li a").click()
    assert other.answered("second").locator(".versions").inner_text() == "2/2"


def test_a_file_of_another_kind_is_not_imported(tab, tmp_path):
    def conversation(**more):
        return json.dumps({"format": "fastllm-conversations", "version": 1, "conversations": [{"title": "t", "messages": [], **more}]})

    def message(role, parent):
        return conversation(messages=[{"id": "a", "role": role, "parent": parent, "content": "x"}])

    bad = ["", "[]", "no json", conversation(title=5), message("system", None), message("user", "a"), message("user", "b")]
    tab.button("Preferences").click()
    for number, text in enumerate(bad):
        file = tmp_path / f"bad{number}.json"
        file.write_text(text)
        tab.page.locator("dialog input[type=file]").set_input_files(file)
        tab.page.get_by_text(f"bad{number}.json is not a file that this page has exported").wait_for()
    assert tab.page.locator(".list li").count() == 0


def test_a_key_is_asked_for_and_lives_as_long_as_the_tab(open_tab, fake):
    fake.key = "right-key-1"
    tab = open_tab(fake.url)
    dialog = tab.page.get_by_role("dialog")
    dialog.wait_for()
    tab.page.keyboard.press("Escape")
    tab.ask("Hi")  # asks again, and the question waits for the key
    tab.page.get_by_label("API key", exact=True).fill("wrong-key-1")
    tab.page.keyboard.press("Enter")
    tab.page.get_by_text("The key was not accepted.").wait_for()
    tab.page.get_by_label("API key", exact=True).fill("right-key-1")
    tab.page.keyboard.press("Enter")
    tab.answered("Hello!")
    assert tab.page.locator(".message").count() == 2
    assert tab.page.evaluate("JSON.stringify({...localStorage}) + document.cookie").find("right-key") < 0
    tab.reload()
    tab.ask("Again")
    tab.page.locator(".message.assistant").nth(1).wait_for()
    tab.answered("Hello!")
    assert dialog.count() == 0


def test_text_files_come_by_button_by_drop_and_by_paste(tab, fake, tmp_path):
    (tmp_path / "a.py").write_text("print('```')\n")
    (tmp_path / "b.bin").write_bytes(b"\xff\x00\x01")
    tab.page.locator(".composer input[type=file]").set_input_files([tmp_path / "a.py", tmp_path / "b.bin"])
    tab.page.get_by_text("b.bin is not a text file").wait_for()
    event = """(kind) => {
      const data = new DataTransfer();
      data.items.add(new File(["from " + kind], kind + ".txt", {type: "text/plain"}));
      const target = document.getElementById("composer");
      const init = {bubbles: true, cancelable: true};
      target.dispatchEvent(kind === "drop" ? new DragEvent(kind, {...init, dataTransfer: data}) : new ClipboardEvent(kind, {...init, clipboardData: data}));
    }"""
    tab.page.evaluate(event, "drop")
    tab.page.evaluate(event, "paste")
    tab.count(".chips li", 3)
    tab.button("Remove drop.txt").click()
    tab.ask("What is this?")
    tab.answered("Hello!")
    content = fake.seen[0]["messages"][0]["content"]
    assert content == "a.py\n````py\nprint('```')\n\n````\n\npaste.txt\n```txt\nfrom paste\n```\n\nWhat is this?"
    assert tab.page.locator(".message.user details.file").count() == 2


def test_tool_calls_are_shown_and_their_results_sent(tab, fake):
    fake.answers = [[{"call": ("weather", '{"city": "Bern"}')}], ["It is sunny."]]
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    tab.button("Settings of this conversation").click()
    box = tab.page.get_by_label("Tools")
    box.fill("[1]")
    tab.page.get_by_text("This is not a JSON list of functions").wait_for()
    box.fill(json.dumps([tool]))
    tab.page.keyboard.press("Escape")
    tab.ask("Weather in Bern?")
    answer = tab.answered("Calls weather")
    assert '"city": "Bern"' in answer.locator("pre").inner_text()
    answer.get_by_label("Result of weather").fill("sunny")
    tab.button("Send the results").click()
    tab.answered("It is sunny.")
    assert fake.seen[0]["tools"] == [tool]
    sent = fake.seen[1]["messages"]
    assert sent[1]["tool_calls"] == [{"id": "call_0", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}]
    assert sent[2] == {"role": "tool", "tool_call_id": "call_0", "content": "sunny"}


def test_an_answer_that_ran_into_the_limit_can_go_on(tab, fake):
    fake.answers = [["half", {"finish": "length"}], [" and whole"]]
    tab.ask("Tell")
    tab.answered("The answer has reached the limit of tokens.").get_by_role("button", name="Continue").click()
    tab.answered("half and whole")


def test_errors_of_the_server_are_said_and_a_busy_one_is_asked_again(tab, fake):
    fake.refuse = [(400, "the prompt has 9000 tokens; the limit is 4096", "context_length_exceeded")]
    tab.ask("Long")
    answer = tab.answered("The server could not answer: the prompt has 9000 tokens; the limit is 4096")
    fake.refuse = [(503, "the queue is full", "unavailable")]
    answer.get_by_role("button", name="Try again").click()
    tab.page.get_by_text("The server is busy. The question is sent again in 1 s.").wait_for()
    tab.answered("Hello!")
    assert tab.page.locator(".message").count() == 2
    fake.answers = [["part", {"error": {"message": "the engine failed", "code": None}}]]
    tab.ask("More")
    tab.answered("part")
    tab.page.get_by_text("The connection was lost. What had come is kept.").wait_for()


def test_a_slow_network_shows_each_piece_as_it_comes(tab, fake):
    session = tab.context.new_cdp_session(tab.page)
    session.send("Network.enable")
    words = [f"word{i} " for i in range(80)]
    fake.answers = [words]
    session.send("Network.emulateNetworkConditions", {"offline": False, "latency": 200, "downloadThroughput": 4000, "uploadThroughput": 3000})
    tab.ask("Slowly")
    tab.page.evaluate("""() => {
      window.seen = new Set();
      const look = () => { window.seen.add(document.querySelector(".message.assistant .markdown")?.innerText.length); requestAnimationFrame(look); };
      look();
    }""")
    tab.answered("word79")
    assert tab.page.evaluate("window.seen.size") >= 5
    assert tab.page.locator(".message.assistant .markdown").inner_text().split() == [w.strip() for w in words]


def test_a_network_that_is_gone_is_said_and_its_return_too(tab, fake):
    fake.answers = [["Beginning", threading.Event()], [" and end."]]
    tab.ask("Tell")
    tab.page.locator(".markdown", has_text="Beginning").wait_for()
    fake.stop()
    tab.page.get_by_text("The connection was lost. What had come is kept.").wait_for()
    tab.page.get_by_text("The server cannot be reached. Trying again …").wait_for()
    tab.ask("Is anybody there?")
    tab.answered("The server cannot be reached.")
    fake.start()
    tab.page.get_by_text("The server is back.").wait_for()
    tab.page.locator(".message.user").nth(1).hover()
    tab.page.locator(".message.assistant").nth(1).get_by_role("button", name="Try again").click()
    tab.answered("and end.")
    assert [m["content"] for m in fake.seen[1]["messages"]] == ["Tell", "Beginning", "Is anybody there?"]


def test_a_retry_keeps_the_part_that_came(tab, fake):
    fake.answers = [["Beginning", "CUT"], ["Another answer."]]
    tab.ask("Tell")
    tab.page.get_by_text("The connection was lost. What had come is kept.").wait_for()
    tab.button("Try again").click()
    answer = tab.answered("Another answer.")
    assert answer.locator(".versions").inner_text() == "2/2"
    tab.button("Previous version").click()
    tab.answered("Beginning").get_by_role("button", name="Continue").wait_for()


def test_a_reload_in_the_middle_keeps_what_had_come(tab, fake):
    fake.answers = [["So far", threading.Event()], [", so good."]]
    tab.ask("Tell")
    tab.page.locator(".markdown", has_text="So far").wait_for()
    tab.reload()
    answer = tab.page.locator(".message.assistant", has_text="So far")
    answer.get_by_role("button", name="Continue").click()
    tab.answered("So far, so good.")


def test_a_conversation_that_is_deleted_while_it_is_answered_does_not_come_back(tab, fake):
    fake.answers = [["begin", threading.Event()]]
    tab.ask("Delete me")
    tab.page.locator(".markdown", has_text="begin").wait_for()
    tab.button("Delete: Delete me").click()
    tab.page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    tab.count(".list li", 0)
    assert fake.gone.wait(20)
    tab.reload()
    tab.count(".list .empty", 1)
    tab.count(".list li", 0)


def test_a_running_answer_goes_on_in_another_conversation(tab, fake):
    go = threading.Event()
    fake.answers = [["begin ", go, "end"], ["other"]]
    tab.ask("First")
    tab.page.locator(".markdown", has_text="begin").wait_for()
    tab.button("New chat").click()
    tab.ask("Second")
    tab.answered("other")
    go.set()
    tab.page.locator(".list li", has_text="First").locator("a").click()
    tab.answered("begin end")


@pytest.mark.parametrize(("root_path", "address"), [("/llm", "llm"), ("/llm", "llm/"), ("", "llm/")])
def test_the_page_works_behind_a_proxy_with_a_prefix(open_tab, fake, root_path, address):
    """With --root-path, and without it where the proxy takes the prefix away."""
    fake.prefix, fake.page = "/llm", Page(root_path)
    tab = open_tab(fake.url + address)
    tab.ask("Hi")
    tab.answered("Hello!")
    tab.reload()
    tab.answered("Hello!")
