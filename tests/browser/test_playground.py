"""The page of `tvq serve`: generate, stop, continue, files, errors and the API key."""

import re

from pages import KEY, TIMEOUT, generate, get, marked, post, tokens
from playwright.sync_api import expect
from servers import wait_until


def test_text_streams_and_equals_that_of_the_api(page, server):
    text = generate(page, "the cat sat")
    options = {"max_tokens": 40, "temperature": 0.8, "top_p": 0.95, "seed": 1}
    (choice,) = post(server, "/v1/completions", prompt="the cat sat", **options)["choices"]
    assert text == "the cat sat" + choice["text"]
    assert page.locator("#stream span").count() > 20  # one per chunk
    status = page.get_by_role("status")
    expect(status).to_contain_text(re.compile(r"40 tokens, [\d.,]+ tokens per second"))
    expect(status).to_contain_text(re.compile(r"Cached: \d+ of 12 prompt tokens"))
    expect(page.locator("#progress")).to_be_hidden()


def test_stop_ends_the_request_and_the_text_is_inspected(page, server):
    page.get_by_label("Max tokens").fill("60000")
    page.get_by_role("button", name="Generate").click()
    expect(page.locator("#progress")).to_contain_text("tokens per second")
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_role("status")).to_contain_text("Stopped.")
    expect(page.get_by_role("button", name="Stop")).to_be_disabled()
    expect(tokens(page).first).to_be_visible()
    wait_until(lambda: not get(server, "/health")["active"])


def test_text_is_never_markup(page):
    prompt = "<img src=x onerror=alert(1)><script>alert(2)</script> \\ & é 日\x01\n\n"
    text = generate(page, prompt, n_tokens=3)
    assert text.startswith(prompt)
    for place in ("#stream", "#tokens", "#details"):
        assert page.locator(f"{place} img, {place} script").count() == 0
    shown = page.locator("#tokens").text_content()
    assert "\u2039e6\u203a\u203997\u203a" in shown  # bytes of a longer character
    assert "\u203901\u203a" in shown  # a control character
    assert len(marked(page, "prompt")) == len(prompt.encode())


def test_error_of_the_api_is_shown_and_disappears(page, visits):
    visits.expected.append("status of 400")
    alert = page.locator("#error")
    page.get_by_label("Max tokens").fill("1000000")
    page.get_by_role("button", name="Generate").click()
    expect(alert).to_contain_text("max_tokens: must be at most")
    expect(alert).to_have_attribute("role", "alert")
    expect(page.get_by_role("status")).to_have_text("Failed.")
    generate(page, n_tokens=3)
    expect(alert).to_be_hidden()


def test_lost_server_is_reported(page, visits):
    visits.expected.append("ERR_FAILED")
    page.route("**/v1/completions", lambda route: route.abort())
    page.get_by_role("button", name="Generate").click()
    expect(page.locator("#error")).to_contain_text("The server cannot be reached")


def test_api_key_is_asked_for_and_kept_for_the_session_only(visits, server_with_key):
    visits.expected.append("status of 401")
    page = visits.open(server_with_key)
    field = page.get_by_label("API key")
    expect(field).to_be_focused()
    expect(page.get_by_role("alert").first).to_contain_text("This server needs an API key.")
    field.fill("wrong")
    page.get_by_role("button", name="Use key").click()
    expect(page.get_by_role("alert").first).to_contain_text("The API key is wrong.")
    field.fill(KEY)
    field.press("Enter")
    expect(page.get_by_role("status")).to_have_text("Ready.")
    expect(field).to_be_hidden()
    generate(page, n_tokens=5)
    page.reload()
    expect(page.get_by_role("status")).to_have_text("Ready.")
    assert KEY not in page.evaluate("JSON.stringify(localStorage) + document.cookie")
    other = visits.open(server_with_key)
    expect(other.get_by_label("API key")).to_be_visible()
    assert visits.origins == {server_with_key}
    visits.origins.clear()


def test_small_file_becomes_the_prompt(page):
    page.get_by_label("Text file").set_input_files(
        {"name": "a.txt", "mimeType": "text/plain", "buffer": "the mat é".encode()}
    )
    expect(page.get_by_label("Prompt")).to_have_value("the mat é")
    page.get_by_label("Text file").set_input_files(
        {"name": "b.txt", "mimeType": "text/plain", "buffer": b"\xff\xfe\x00"}
    )
    expect(page.locator("#error")).to_contain_text("b.txt is not a text file")
    expect(page.get_by_label("Prompt")).to_have_value("the mat é")


def test_large_file_is_stored_and_continued(page):
    text = "the cat sat on the mat and then it ran off. " * 4600
    page.get_by_label("Text file").set_input_files(
        {"name": "long.txt", "mimeType": "text/plain", "buffer": text.encode()}
    )
    document = page.get_by_label("Document to continue")
    size = f"{len(text) + 1:,} tokens"
    stored = re.compile(rf"long.txt is stored \({size}\)")
    expect(page.get_by_role("status")).to_have_text(stored, timeout=3 * TIMEOUT)
    expect(document.locator("option:checked")).to_have_text(f"long.txt ({size})")
    expect(page.get_by_label("Prompt")).to_have_value("")
    with page.expect_request("**/v1/completions") as sent:
        generate(page, prompt="", n_tokens=20)
    assert sent.value.post_data_json["context"].startswith("ctx-")
    expect(page.locator("#kv-bytes")).to_contain_text(f"{len(text) + 1 + 20:,} tokens")
    expect(page.locator("#note")).to_contain_text(f"follows the {size} of the document")
    expect(tokens(page)).to_have_count(20)
    page.get_by_role("button", name="Delete").click()
    expect(document).to_be_hidden()
