"""The page of `tvq serve`: tokens by surprisal, their codes and their attention."""

import pytest
from pages import BLOCK_LEN, N_LEVEL, PHONE, generate, marked, post, shown_token, tokens
from playwright.sync_api import expect


def test_tokens_show_surprisal_and_the_prompt(page, server):
    text = generate(page)
    found = post(server, "/v1/inspect", text=text)
    expect(tokens(page)).to_have_count(len(found["tokens"]))
    levels = tokens(page).evaluate_all(
        "all => all.map(x => Number(/level-(.)/.exec(x.className)[1]))"
    )
    want = [0 if x is None else min(N_LEVEL - 1, int(x / 2)) for x in found["surprisal"]]
    assert levels == want
    assert marked(page, "prompt") == list(range(1, 1 + len("the cat sat")))
    legend = page.get_by_role("list", name="Surprisal in bits per token").get_by_role("listitem")
    expect(legend).to_have_count(N_LEVEL)
    expect(legend.last).to_have_css("text-decoration-line", "underline")


def test_click_shows_the_details_of_a_token(page, server):
    found = post(server, "/v1/inspect", text=generate(page, n_tokens=150))
    position = 2 * BLOCK_LEN + 20
    tokens(page).nth(position).click()
    assert shown_token(page) == position
    panel = page.get_by_role("region", name="Token")
    expect(panel).to_contain_text(f"{found['surprisal'][position]:.2f} bits")
    expect(page.locator("#facts dd").first).to_have_text(str(found["tokens"][position]))
    for layer in range(len(found["layers"])):
        for head in range(2):
            panel.get_by_label("Layer").select_option(str(layer))
            panel.get_by_label("Head").select_option(str(head))
            check_layer(page, found["layers"][layer], head, position)


def check_layer(page, layer, head, position):
    """Compare the panel to the response of the API."""
    codes = layer["codes"][head]
    same = [i for i in range(position) if codes[i] == codes[position]]
    expect(page.locator("#code")).to_have_text(str(codes[position]))
    assert marked(page, "same") == same
    nearest = page.get_by_role("list", name="Nearest earlier tokens").get_by_role("button")
    targets = nearest.evaluate_all("all => all.map(x => Number(x.dataset.target))")
    assert targets == same[::-1][:8]
    for name in ("window", "cache"):
        value = float(page.locator(f"#{name}").text_content().removesuffix("%"))
        assert value == pytest.approx(100 * layer[name][head][position], abs=0.06)
    buttons = page.locator("#top-codes button")
    weights = layer["top_weights"][head][position]
    top = [code for code, x in zip(layer["top_codes"][head][position], weights, strict=True) if x]
    assert [int(text.split()[1].rstrip(":")) for text in buttons.all_text_contents()] == top
    in_cache = position - BLOCK_LEN
    buttons.first.click()
    assert marked(page, "example") == [i for i in range(in_cache) if codes[i] == top[0]]
    expect(page.locator("#top-codes li").first).to_contain_text("“")


def test_keyboard_moves_between_tokens(visits):
    page = visits.open(viewport=PHONE)  # several lines
    text = generate(page)
    last = len(text)  # the first token is the start of the text
    tokens(page).nth(5).click()
    for key, want in [("End", last), ("ArrowLeft", last - 1), ("Home", 0), ("ArrowRight", 1)]:
        page.keyboard.press(key)
        assert shown_token(page) == want
        assert page.evaluate("document.activeElement.dataset.position") == str(want)
    page.keyboard.press("ArrowDown")
    assert shown_token(page) > 10
    page.keyboard.press("ArrowUp")
    assert shown_token(page) < 10
