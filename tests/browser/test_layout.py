"""The page of `tvq serve`: colors, phones, motion and landmarks."""

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


def test_landmarks_and_headings_exist(page):
    for role in ("banner", "main", "navigation"):
        expect(page.get_by_role(role)).to_have_count(1)
    names = ("Document", "Playground", "Text", "Token")
    for name in names:
        expect(page.get_by_role("region", name=name, exact=True)).to_have_count(1)
        expect(page.get_by_role("heading", name=name, exact=True)).to_have_count(1)
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the text")).to_be_focused()
