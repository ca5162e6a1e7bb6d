"""What the tests of the page share: its sizes, and how it is used."""

import json
import urllib.request

from playwright.sync_api import expect

TIMEOUT = 60_000  # milliseconds
KEY = "a-secret-key"
BLOCK_LEN = 64
DESKTOP = {"width": 1280, "height": 800}
PHONE = {"width": 360, "height": 740}
N_LEVEL = 6


def post(url, path, **body):
    """Return the response of the API."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def get(url, path):
    with urllib.request.urlopen(url + path, timeout=60) as response:
        return json.load(response)


def generate(page, prompt="the cat sat", n_tokens=40, seed=1):
    """Fill in the form, generate and wait for the tokens; return the whole text."""
    page.get_by_label("Prompt").fill(prompt)
    if not page.get_by_label("Max tokens").is_visible():  # on a phone
        page.get_by_text("Parameters and files").click()
    page.get_by_label("Max tokens").fill(str(n_tokens))
    page.get_by_label("Seed").fill(str(seed))
    page.get_by_role("button", name="Generate").click()
    expect(page.get_by_role("status")).to_contain_text("Finished")
    expect(tokens(page).first).to_be_visible()
    return page.locator("#stream").text_content()


def wait_for_example(page):
    """Wait until the example document is stored and the text after it is shown."""
    expect(tokens(page).first).to_be_visible(timeout=3 * TIMEOUT)


def n_document(page):
    """Number of tokens of the document."""
    return int(page.locator("#n-document").text_content().replace(",", ""))


def tokens(page):
    return page.get_by_role("listbox", name="Tokens").get_by_role("option")


def shown_token(page):
    """Position of the token that the panel describes."""
    return int(page.locator("#facts dd").nth(1).text_content().replace(",", ""))


def marked(page, name):
    """Positions of the tokens with a class."""
    return page.locator(f"#tokens .{name}").evaluate_all(
        "found => found.map(token => Number(token.dataset.position))"
    )


def fits(page):
    return page.evaluate("document.documentElement.scrollWidth <= innerWidth")
