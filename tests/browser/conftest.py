"""A server, a browser, and pages that must not have errors."""

import os
import shutil
from dataclasses import dataclass, field, replace

import pytest
from helpers import tiny_run
from pages import BLOCK_LEN, DESKTOP, KEY, TIMEOUT
from playwright.sync_api import Page, expect, sync_playwright
from servers import serving

from transformer_vq.training.run import train

BROWSERS = ("chromium", "chromium-browser", "google-chrome")  # before Playwright's own
FLAGS = ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
STOP = ("--stop-time", "0.1")


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """Return a run on bytes with two heads; its texts have no end."""
    folder = tmp_path_factory.mktemp("run")
    sizes = {"head_type": "mha", "vocab_size": 256, "block_len": BLOCK_LEN, "n_code": 12}
    config = tiny_run(folder, model=sizes, train={"steps": 60}, optim={"lr": 1e-2})
    train(replace(config, data=replace(config.data, end_of_document=False)), folder / "small")
    return folder / "small"


@pytest.fixture(scope="session")
def server(run, tmp_path_factory):
    with serving(run, tmp_path_factory.mktemp("server"), *STOP) as client:
        yield client.url


@pytest.fixture(scope="session")
def server_with_key(run, tmp_path_factory):
    with serving(run, tmp_path_factory.mktemp("key"), *STOP, "--api-key", KEY) as client:
        yield client.url


@pytest.fixture(scope="session")
def new_server(run, tmp_path_factory):
    """Start a server without visitors, for the tests of the first visit."""
    with serving(run, tmp_path_factory.mktemp("new"), *STOP) as client:
        yield client.url


@pytest.fixture(scope="session")
def browser():
    executable = next(filter(None, map(shutil.which, BROWSERS)), None)
    root = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=[*FLAGS, *root])
        yield browser
        browser.close()


@dataclass
class Visits:
    """Opens pages; afterwards, checks that no page had errors or used another server."""

    browser: object
    url: str
    expected: list[str] = field(default_factory=list)
    """Parts of console messages that a test provokes."""
    errors: list[str] = field(default_factory=list)
    origins: set[str] = field(default_factory=set)
    contexts: list[object] = field(default_factory=list)

    def open(self, url=None, is_first=False, **options) -> Page:
        """Open the page in a new profile, as a visitor who has been there or not."""
        context = self.browser.new_context(**({"viewport": DESKTOP} | options))
        context.set_default_timeout(TIMEOUT)
        self.contexts.append(context)
        page = context.new_page()
        page.on("console", lambda m: m.type == "error" and self.errors.append(m.text))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda r: self.origins.add("/".join(r.url.split("/")[:3])))
        if not is_first:
            page.add_init_script("localStorage.setItem('transformer-vq-document', 'yes')")
        page.goto(url or self.url)
        return page

    def check(self):
        for context in self.contexts:
            context.close()
        found = [e for e in self.errors if not any(part in e for part in self.expected)]
        assert not found
        return self.origins


@pytest.fixture
def visits(browser, server):
    expect.set_options(timeout=TIMEOUT)
    visits = Visits(browser, server)
    yield visits
    assert visits.check() <= {server, visits.url}


@pytest.fixture
def page(visits):
    """Return the page of a visitor who has been there before."""
    page = visits.open()
    expect(page.get_by_role("status")).to_have_text("Ready.")
    return page
