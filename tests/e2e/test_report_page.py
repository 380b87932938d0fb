"""The report in a real browser: headless Chromium without network."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from openrlhf_ext.cli.report import main

CHROMIUM = shutil.which("chromium")
playwright = pytest.importorskip("playwright.sync_api", reason="NOT TESTED, no playwright: pip install playwright")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="NOT TESTED, no chromium: apt-get install chromium")

NUM_STEPS = 100


def write_run(folder: Path, *, gain: float, seconds: float) -> None:
    """A run with everything that the report plots."""
    lines = []
    for step in range(NUM_STEPS + 1):
        spent = {"step": step, "train_wall_s": seconds * step, "budget/rollouts_generated": 128 * step}
        if step:
            lines.append(
                {
                    "kind": "train",
                    **spent,
                    "timing/generation": 0.6 * seconds,
                    "timing/ppo_train": 0.4 * seconds,
                    "timing/step_total": seconds,
                    "step/num_trained_fresh": 64 + step // 4,
                    "step/num_replaced_zero_variance": 64 - step // 4,
                    "rows/share_fresh": 0.75,
                    "rows/share_filled": 0.25,
                    "replay/age_mean": 3 + math.sin(step),
                    "replay/effective_sample_frac": 0.9,
                    "replay/behavior_kl": 0.001 * step,
                    "fresh/ratio_clipped_frac": 0.01,
                    "pool/num_active": 1000 - step,
                    "pool/num_excluded": step,
                    "train/actor_grad_norm": 0.5,
                    "rollout/entropy_mean": 1 / (1 + step),
                    "groups/effective_frac_generated": 0.5,
                    "groups/effective_frac_trained": 1.0,
                }
            )
        if step % 10 == 0:
            accuracy = {"eval/accuracy": 0.2 + gain * step / NUM_STEPS, "eval/accuracy_se": 0.02}
            lines.append({"kind": "eval", **spent, **accuracy, "policy/distance_relative": 1e-4 * step})
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "summary.json").write_text("{}")
    text = "<img src=http://example.org/x.png onerror=alert(1)>\ud83d\x00"
    samples = [{"step": step, "prompt_id": "p", "prompt": text, "response": text} for step in (1, 2, 3)]
    (folder / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in samples))


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A suite of three methods at two learning rates; accuracy rises by the place in the suite, but not by name."""
    folder = tmp_path_factory.mktemp("suite")
    names = [(method, lr) for lr in (1e-4, 3e-5) for method in ("popo", "grpo", "trl")]
    entries = [{"method": method, "lr": lr, "seed": 1, "dir": f"runs/{method}-lr{lr:g}-seed1"} for method, lr in names]
    for i, entry in enumerate(entries):
        write_run(folder / str(entry["dir"]), gain=0.02 * i, seconds=2.0 + 3 * i)
    entries.append({"method": "dapo", "lr": 1e-4, "seed": 1, "dir": "runs/dapo"})
    (folder / "suite.json").write_text(json.dumps({"name": "small", "runs": entries}))
    (folder / "results.md").write_text("| method | accuracy |\n|---|---|\n| popo | 0.4 |\n")
    assert main([str(folder)]) == 0
    return folder


class Visit:
    """A page and what went wrong in it."""

    def __init__(self, page) -> None:
        self.page = page
        self.problems: list[str] = []
        page.on("console", lambda message: self.problems.append(message.text))
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("requestfailed", lambda request: self.problems.append(f"failed: {request.url[:100]}"))
        page.on("request", lambda request: self._requested(request.url))

    def _requested(self, url: str) -> None:
        if not url.startswith(("file:", "data:")):
            self.problems.append(f"external: {url}")

    def column(self, name: str) -> list[str]:
        place = self.page.locator("#run-table th").all_inner_texts().index(name) + 1
        return self.page.locator(f"#run-table td:nth-child({place})").all_inner_texts()

    def sort_by(self, name: str) -> None:
        self.page.locator("#run-table th", has=self.page.get_by_role("button", name=name, exact=True)).click()


@pytest.fixture(scope="module")
def visit(suite: Path) -> Iterator[Visit]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(
            executable_path=CHROMIUM,
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"],
        )
        visit = Visit(browser.new_page(viewport={"width": 1280, "height": 900}))
        visit.page.goto((suite / "report" / "report.html").as_uri(), wait_until="load")
        yield visit
        browser.close()


def test_every_plot_is_drawn_and_is_a_file_too(suite: Path, visit: Visit) -> None:
    widths = visit.page.eval_on_selector_all("img", "all => Object.fromEntries(all.map(i => [i.id, i.naturalWidth]))")
    files = {path.stem for path in (suite / "report" / "plots").glob("*.png")}
    assert set(widths) == files and len(files) == 15
    assert all(width > 0 for width in widths.values())


def test_the_page_fits_a_screen_of_1280_pixels(visit: Visit) -> None:
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= 1280


def test_a_click_sorts_by_number_and_a_second_one_turns_it_around(visit: Visit) -> None:
    visit.sort_by("step seconds")
    assert visit.column("step seconds") == ["2.000", "5.000", "8.000", "11.000", "14.000", "17.000", "-"]
    visit.sort_by("step seconds")
    assert visit.column("step seconds") == ["17.000", "14.000", "11.000", "8.000", "5.000", "2.000", "-"]
    visit.sort_by("method")
    assert visit.column("method") == ["dapo", "grpo", "grpo", "popo", "popo", "trl", "trl"]


def test_every_entry_of_the_contents_leads_somewhere(visit: Visit) -> None:
    links = visit.page.eval_on_selector_all("nav a", "all => all.map(a => a.getAttribute('href'))")
    assert len(links) == 10
    assert [visit.page.locator(link).count() for link in links] == [1] * len(links)


def test_text_of_a_sample_is_text(visit: Visit) -> None:
    visit.page.locator("details").evaluate_all("all => all.forEach(one => { one.open = true; })")
    text = visit.page.locator(".sample pre").first.inner_text()
    assert text == "<img src=http://example.org/x.png onerror=alert(1)>\\ud83d\\u0000"


def test_nothing_fails_and_nothing_is_asked_of_another_host(visit: Visit) -> None:
    visit.page.reload(wait_until="load")
    assert visit.problems == []
