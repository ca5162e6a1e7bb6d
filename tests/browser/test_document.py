"""The page of `tvq serve`: the example document, its memory, and texts that continue it."""

import pytest
from pages import (
    generate,
    get,
    n_document,
    post,
    shown_token,
    tokens,
    wait_for_example,
)
from playwright.sync_api import expect

NAME = "Gallegher and Other Stories"


@pytest.fixture
def first_visit(visits, new_server):
    """Return a page of somebody who has never been there, and the paths that it sent texts to."""

    visits.url = new_server

    def open_page(**options):
        page = visits.open("about:blank", is_first=True, **options)
        sent = []
        page.on("request", lambda r: r.method == "POST" and sent.append(r.url.split("/v1/")[1]))
        page.goto(new_server)
        return page, sent

    return open_page


def test_first_visit_stores_the_example_and_generates_nothing(first_visit, new_server):
    page, sent = first_visit()
    expect(page.locator("#prefill-count")).to_contain_text("tokens")
    expect(page.locator("#stream")).to_contain_text("GALLEGHER AND OTHER STORIES")
    expect(page.get_by_role("button", name="Generate")).to_be_disabled()
    wait_for_example(page)
    expect(page.get_by_role("button", name="Generate")).to_be_enabled()
    (entry,) = get(new_server, "/v1/contexts")["data"]
    assert (entry["name"], entry["tokens"]) == (NAME, n_document(page))
    expect(page.locator("#context option:checked")).to_contain_text(NAME)
    assert [path.split("?")[0] for path in sent] == ["contexts", "inspect"]
    page.reload()
    wait_for_example(page)
    assert len(get(new_server, "/v1/contexts")["data"]) == 1
    assert [path.split("?")[0] for path in sent] == ["contexts", "inspect", "inspect"]


def test_memory_of_the_document_is_shown_beside_that_of_a_kv_cache(first_visit, new_server):
    page, _ = first_visit()
    wait_for_example(page)
    (model,) = get(new_server, "/v1/models")["data"]
    n_text = tokens(page).count()
    n = n_document(page) + n_text
    assert n > 100_000
    expect(page.locator("#n-text")).to_have_text(f"{n_text}")
    expect(page.locator("#n-position")).to_have_text(f"{n:,}")
    times = round(n * model["kv_bytes_per_token"] / model["state_bytes"])
    expect(page.locator("#kv-bytes")).to_contain_text(f"for {n:,} tokens ({times:,}x)")
    widths = [page.locator(f"#{x}-bar").bounding_box()["width"] for x in ("state", "kv")]
    assert widths[1] == pytest.approx(times * widths[0], rel=0.1)


def test_text_is_inspected_after_the_document(first_visit, new_server):
    page, _ = first_visit()
    wait_for_example(page)
    (entry,) = get(new_server, "/v1/contexts")["data"]
    text = page.get_by_label("Prompt").input_value()
    found = post(new_server, "/v1/inspect", text=text, context=entry["id"])
    tokens(page).nth(20).click()
    assert shown_token(page) == entry["tokens"] + 20
    share = 100 * found["layers"][0]["cache"][0][20]
    assert share > 1
    assert float(page.locator("#cache").text_content().removesuffix("%")) == pytest.approx(
        share, abs=0.06
    )
    expect(page.locator("#top-codes li").first).to_contain_text("in the document")
    with page.expect_request("**/v1/inspect") as sent:
        generate(page, "", n_tokens=10)
    assert sent.value.post_data_json["context"] == entry["id"]
    expect(page.locator("#n-position")).to_have_text(f"{entry['tokens'] + 10:,}")


def test_deleted_example_stays_deleted(visits, server):
    post(server, "/v1/contexts", text="a short document", name=NAME)
    page = visits.open(is_first=True)
    wait_for_example(page)
    page.get_by_role("button", name="Delete").click()
    expect(page.get_by_role("button", name="Load the example document")).to_be_visible()
    page.reload()
    expect(page.get_by_role("status")).to_have_text("Ready.")
    expect(page.get_by_role("button", name="Load the example document")).to_be_visible()
    assert get(server, "/v1/contexts")["data"] == []
