"""The report in a real browser: it renders, hovering and the keyboard work, it can be read, and no request leaves the machine."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser, chromium
from report_pages import HOSTILE, make_run

from datc_train.report import write_report


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(make_run(tmp_path_factory.mktemp("runs") / "one"))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if chromium() is None:
        pytest.skip("Chromium is not installed here: the report's page was not looked at in a browser")
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


def tip(browser: Browser) -> str | None:
    """What the page shows beside the pointer or the focus."""
    shown: str | None = browser.evaluate(
        "(() => { const t = document.getElementById('tip'); return t.hidden ? null : t.innerText; })()"
    )
    return shown


def test_in_a_browser(browser: Browser, report: Path, tmp_path: Path) -> None:
    browser.open(report)
    assert browser.evaluate("document.querySelectorAll('figure svg').length") == 7
    assert browser.evaluate("[...document.querySelectorAll('figure svg')].every(s => s.getBoundingClientRect().height > 100)")
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert tip(browser) is None
    browser.hover(".tokens .t", 0)
    text = tip(browser) or ""
    for shown in (
        " Be",
        "weight\t4",
        "advantage of the response\t+1",
        "of this token\t+4",
        "credit\t−0.001",
        "probability\t12.50 %",
    ):
        assert shown in text
    assert f"{HOSTILE}\t25.00 %\t−0.0125" in text
    assert browser.evaluate("document.querySelector('#tip .chosen code').textContent") == " Be"
    browser.hover(".tokens .t", 2)
    assert "(frozen)" in (tip(browser) or "")
    browser.hover("h1")
    assert tip(browser) is None
    browser.screenshot(tmp_path / "page.png", whole=True)
    assert (tmp_path / "page.png").stat().st_size > 20_000
    # The page asked for itself and nothing else, and its scripts had nothing to complain of.
    assert browser.requests == [report.resolve().as_uri()]
    assert browser.complaints == []


def test_by_keyboard(browser: Browser, report: Path) -> None:
    browser.open(report)
    browser.evaluate("document.querySelector('.tokens').focus()")
    browser.press("ArrowRight")
    assert "weight\t4" in (tip(browser) or "")
    assert browser.evaluate("document.activeElement.getAttribute('aria-describedby')") == "tip"
    browser.press("End")
    assert "(frozen)" in (tip(browser) or "")
    browser.press("Escape")
    assert tip(browser) is None


def luminance(colour: str) -> float:
    channels = [float(x) / 255 for x in re.findall(r"[\d.]+", colour)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_shade_can_be_read(browser: Browser, report: Path, scheme: str) -> None:
    """Contrast of the letters with the strongest colours, laid over the card, is at least 4.5 to 1 in both schemes."""
    browser.scheme(scheme)
    browser.open(report)
    for selector in (".t.u", ".t.d", ".tokens .f", "figcaption", ".head"):
        ink, shade, card = browser.evaluate(
            f"(() => {{ const e = document.querySelector({selector!r}), s = getComputedStyle(e);"
            " return [s.color, s.backgroundColor, getComputedStyle(document.querySelector('.panel')).backgroundColor]; })()"
        )
        numbers = [float(x) for x in re.findall(r"[\d.]+", shade)]
        alpha = numbers[3] if len(numbers) == 4 else 1.0
        under = [float(x) for x in re.findall(r"[\d.]+", card)[:3]]
        mixed = str([alpha * a + (1 - alpha) * b for a, b in zip(numbers, under, strict=False)])
        bright, dim = sorted([luminance(ink), luminance(mixed)], reverse=True)
        assert (bright + 0.05) / (dim + 0.05) >= 4.5, selector
    assert (luminance(card) > 0.5) == (scheme == "light")
    stroke = browser.evaluate("getComputedStyle(document.querySelector('#figure-reward svg text')).fill")
    assert (luminance(stroke) > 0.3) == (scheme == "dark")  # figures follow the scheme
