"""The page of `tvq serve`: colors, phones, motion and landmarks."""

import pytest
from pages import PHONE, fits, generate, tokens
from playwright.sync_api import expect


def test_phone_has_no_horizontal_scrolling(visits):
    page = visits.open(viewport=PHONE)
    assert fits(page)
    generate(page, "a" * 300 + " cat", n_tokens=60)
    tokens(page).nth(45).click()
    assert fits(page)
    text, panel = page.locator("#tokens").bounding_box(), page.locator("#details").bounding_box()
    assert panel["y"] >= text["y"] + text["height"]
    assert page.locator("#tokens").evaluate("box => box.scrollWidth <= box.clientWidth")


@pytest.mark.parametrize("is_phone", [False, True])
def test_hints_fit_the_device(visits, is_phone):
    options = {"viewport": PHONE, "has_touch": True, "is_mobile": True} if is_phone else {}
    page = visits.open(**options)
    for hint, is_for_phones in [("Ctrl+Enter", False), ("Drop a", False), ("Tap a token", True)]:
        expect(page.get_by_text(hint)).to_be_visible(visible=is_for_phones == is_phone)


def test_landmarks_and_headings_exist(page):
    for role in ("banner", "main", "navigation"):
        expect(page.get_by_role(role)).to_have_count(1)
    names = ("Document", "Playground", "Text", "Token")
    for name in names:
        expect(page.get_by_role("region", name=name, exact=True)).to_have_count(1)
        expect(page.get_by_role("heading", name=name, exact=True)).to_have_count(1)
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the text")).to_be_focused()
