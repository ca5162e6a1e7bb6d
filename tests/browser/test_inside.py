"""The page of `tvq serve`: tokens by surprisal, their codes and their attention."""

import pytest
from pages import BLOCK_LEN, N_LEVEL, PHONE, generate, get, marked, post, shown_token, tokens
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


def test_early_tokens_have_an_empty_cache(page):
    generate(page, n_tokens=150)
    tokens(page).nth(BLOCK_LEN).click()
    expect(page.locator("#cache")).to_have_text("0.0%")
    expect(page.locator("#cache-note")).to_contain_text(f"position {BLOCK_LEN + 1} on")
    expect(page.locator("#top-codes li")).to_have_count(0)


def test_pointing_at_a_token_previews_it(page):
    generate(page)
    tokens(page).nth(30).click()
    tokens(page).nth(10).hover()
    assert shown_token(page) == 10
    page.get_by_label("Prompt").hover()
    assert shown_token(page) == 30


def test_tap_selects_a_token(visits):
    page = visits.open(viewport=PHONE, has_touch=True)
    generate(page)
    tokens(page).nth(20).tap()
    assert shown_token(page) == 20


def test_keyboard_moves_between_tokens(visits):
    page = visits.open(viewport=PHONE)  # several lines
    text = generate(page)
    last = len(text)  # the first token is the start of the text
    page.get_by_role("button", name="Continue").focus()
    for _ in range(20):  # Tab reaches the tokens
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.role === 'option'"):
            break
    for key, want in [
        ("End", last),
        ("ArrowLeft", last - 1),
        ("ArrowRight", last),
        ("ArrowRight", last),
        ("Home", 0),
        ("ArrowLeft", 0),
        ("ArrowRight", 1),
    ]:
        page.keyboard.press(key)
        assert shown_token(page) == want
        focused = page.evaluate("document.activeElement.dataset.position")
        assert int(focused) == want
        expect(page.locator("#tokens [tabindex='0']")).to_have_count(1)
        expect(page.locator("#tokens [aria-selected='true']")).to_have_count(1)
    page.keyboard.press("ArrowDown")
    below = shown_token(page)
    assert below > 10
    page.keyboard.press("ArrowUp")
    assert shown_token(page) < 10
    name = page.evaluate("document.activeElement.ariaLabel")
    assert "bits" in name or "start" in name
    assert "code" in name
    page.keyboard.press("Tab")  # leaves the tokens
    assert not page.evaluate("document.activeElement.closest('#tokens')")


def test_focus_is_visible(page):
    generate(page)
    page.keyboard.press("Tab")
    expect(page.locator(":focus-visible")).to_have_css("outline-style", "solid")


def test_token_in_the_list_of_the_same_code_can_be_opened(page):
    generate(page)
    tokens(page).nth(45).click()
    button = page.get_by_role("list", name="Nearest earlier tokens").get_by_role("button").first
    target = int(button.get_attribute("data-target"))
    button.click()
    assert shown_token(page) == target
    assert page.evaluate("document.activeElement.dataset.position") == str(target)


def test_memory_of_the_state_is_constant_and_that_of_a_kv_cache_grows(page, server):
    (model,) = get(server, "/v1/models")["data"]
    assert model["kv_bytes_per_token"] == 2 * 2 * (8 + 8) * 4  # layers, heads, d_k + d_v, float32
    state = page.locator("#state-bytes")
    before = state.text_content()
    assert "constant" in before
    generate(page, "the cat sat", n_tokens=20)
    expect(page.locator("#kv-bytes")).to_have_text(f"{32 * 256 / 1000:.3g} kB for 32 tokens")
    generate(page, "the cat sat", n_tokens=60)
    expect(page.locator("#kv-bytes")).to_have_text(f"{72 * 256 / 1000:.3g} kB for 72 tokens")
    assert state.text_content() == before


def test_long_text_is_inspected_at_its_end(page):
    generate(page, "the cat sat on the mat. " * 300, n_tokens=5)
    expect(page.locator("#note")).to_contain_text("Only the last")
    assert 3000 < tokens(page).count() <= 4096
