"""The page of `tvq serve`: colors, phones, motion and landmarks."""

import re

import pytest
from pages import PHONE, fits, generate, tokens
from playwright.sync_api import expect


def test_colors_follow_the_scheme_and_have_enough_contrast(visits):
    backgrounds = {}
    for scheme in ("light", "dark"):
        page = visits.open(color_scheme=scheme)
        generate(page, n_tokens=3)
        backgrounds[scheme] = page.evaluate("getComputedStyle(document.body).backgroundColor")
        for selector in ["body", ".hint", "button.primary", "#legend li:nth-child(n)", "a"]:
            assert min(contrasts(page, selector)) >= 4.5, (scheme, selector)
    assert luminance(numbers(backgrounds["light"])) > 0.8
    assert luminance(numbers(backgrounds["dark"])) < 0.05


def contrasts(page, selector):
    """WCAG contrast of the text of all elements to what is behind it."""
    pairs = page.locator(selector).evaluate_all(
        """all => all.map(element => {
            const background = (x) => getComputedStyle(x).backgroundColor;
            let behind = element;
            while (/, 0\\)/.test(background(behind))) behind = behind.parentElement;
            return [getComputedStyle(element).color, background(behind)];
        })"""
    )
    for pair in pairs:
        low, high = sorted(luminance(numbers(color)) for color in pair)
        yield (high + 0.05) / (low + 0.05)


def numbers(color):
    return [int(x) / 255 for x in re.findall(r"\d+", color)[:3]]


def luminance(rgb):
    parts = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in rgb]
    return sum(x * weight for x, weight in zip(parts, (0.2126, 0.7152, 0.0722), strict=True))


def test_phone_has_no_horizontal_scrolling(visits):
    page = visits.open(viewport=PHONE)
    assert fits(page)
    generate(page, "a" * 300 + " cat", n_tokens=60)
    tokens(page).nth(45).click()
    assert fits(page)
    text, panel = page.locator("#tokens").bounding_box(), page.locator("#details").bounding_box()
    assert panel["y"] >= text["y"] + text["height"]
    assert page.locator("#tokens").evaluate("box => box.scrollWidth <= box.clientWidth")


def test_generated_text_on_a_phone_is_in_view(visits):
    page = visits.open(viewport=PHONE)
    page.get_by_role("button", name="Generate").click()
    expect(page.get_by_role("heading", name="Text", exact=True)).to_be_in_viewport()


@pytest.mark.parametrize("is_phone", [False, True])
def test_hints_fit_the_device(visits, is_phone):
    options = {"viewport": PHONE, "has_touch": True, "is_mobile": True} if is_phone else {}
    page = visits.open(**options)
    for hint, is_for_phones in [("Ctrl+Enter", False), ("Drop a", False), ("Tap a token", True)]:
        expect(page.get_by_text(hint)).to_be_visible(visible=is_for_phones == is_phone)


def test_invalid_parameter_on_a_phone_is_shown(visits):
    page = visits.open(viewport=PHONE)
    page.locator("#options summary").click()
    page.get_by_label("Top k").fill("0")
    page.locator("#options summary").click()
    expect(page.get_by_label("Top k")).to_be_hidden()
    page.get_by_role("button", name="Generate").click()
    expect(page.get_by_label("Top k")).to_be_focused()
    expect(page.get_by_label("Top k")).to_be_visible()


def test_details_are_beside_the_text_on_a_desktop(page):
    generate(page)
    text, panel = page.locator("#inside").bounding_box(), page.locator("#details").bounding_box()
    assert panel["x"] >= text["x"] + text["width"]
    assert fits(page)


def test_reduced_motion_has_no_transitions(visits):
    durations = {}
    for motion in ("reduce", "no-preference"):
        page = visits.open(reduced_motion=motion)
        durations[motion] = page.evaluate(
            "getComputedStyle(document.getElementById('kv-bar')).transitionDuration"
        )
    assert durations == {"reduce": "0s", "no-preference": "0.15s"}


def test_landmarks_and_headings_exist(page):
    for role in ("banner", "main", "navigation"):
        expect(page.get_by_role(role)).to_have_count(1)
    names = ("Document", "Playground", "Text", "Token")
    for name in names:
        expect(page.get_by_role("region", name=name, exact=True)).to_have_count(1)
        expect(page.get_by_role("heading", name=name, exact=True)).to_have_count(1)
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the text")).to_be_focused()
