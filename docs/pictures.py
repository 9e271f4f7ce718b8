"""Makes the pictures of the documentation from a real run on the embedded simulator.

    .venv/bin/python docs/pictures.py

Six datasets under one cap that does not reach for all of them, and a service with faults: the plan
and the live view as SVG, the page about the finished run as PNG (needs a Chromium). Half a minute.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from importlib import resources
from pathlib import Path
from typing import Any, Final

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from quantroute.cli import _progress, main
from quantroute.generation import builtin_prompts

IMAGES: Final = Path(__file__).parent / "images"
DATASETS: Final = ("b3", "b4", "b5", "b6", "b7", "b8")
COLUMNS: Final = 100
#: Share of the cap that is spent when the live view is taken.
MOMENT: Final = 0.7

RUN: Final = """
[run]
name = "kimi-k25"
model = "moonshotai/kimi-k2.5"
cap_usd = "4.00"
out = "kimi-k25"
max_in_flight = 200

""" + "".join(
    f"""
[[dataset]]
name = "{name}"
prompts = "{name}.jsonl"
rollouts = 12
max_output_tokens = 4096
target_output_tokens = 350_000
"""
    for name in DATASETS
)
FAULTS: Final = """
[faults]
upstream_429 = 0.03
upstream_503 = 0.01
error_in_200 = 0.01
"""


def service() -> str:
    """The shipped case, twenty times faster than real, on an ordinary day."""
    shipped = resources.files("quantroute.simulator") / "scenarios" / "kimi-k2.5.toml"
    text = shipped.read_text(encoding="utf-8")
    return text.replace("time_scale = 0.0", "time_scale = 0.05") + FAULTS


class Camera(Live):
    """Keeps every state of the live view."""

    views: Final[list[Any]] = []

    def update(self, renderable: RenderableType, *, refresh: bool = False) -> None:
        self.views.append(renderable)
        super().update(renderable, refresh=refresh)


def save(picture: RenderableType, name: str, *, title: str) -> None:
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(picture)
    svg = console.export_svg(title=title)
    # The fonts of the machine that shows it: nothing is fetched from elsewhere.
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    (IMAGES / name).write_text(re.sub(r"[ \t]+$", "", svg, flags=re.MULTILINE), encoding="utf-8")


def quantroute(*words: str) -> str:
    command = [sys.executable, "-m", "quantroute", *words]
    return subprocess.run(command, check=False, capture_output=True, text=True).stdout


def page_picture(page: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        print("no Chromium: the page's picture stays as it is")
        return
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    picture = f"--screenshot={IMAGES / 'report.png'}"
    subprocess.run(
        [browser, *flags, picture, "--window-size=1200,1500", page.as_uri()],
        check=True,
        capture_output=True,
    )


def write_prompts(dataset: str) -> None:
    """The prompts that ship with the package, as rows of this dataset alone."""
    lines = [
        json.dumps({"turns": prompt.turns[:1], "system": f"Answer for dataset {dataset}."})
        for prompt in builtin_prompts()
    ]
    Path(f"{dataset}.jsonl").write_text("\n".join(lines), encoding="utf-8")


def make() -> None:
    os.environ |= {"FORCE_COLOR": "1", "COLUMNS": str(COLUMNS)}  # as on such a terminal
    IMAGES.mkdir(exist_ok=True)
    for dataset in DATASETS:
        write_prompts(dataset)
    Path("run.toml").write_text(RUN, encoding="utf-8")
    Path("service.toml").write_text(service(), encoding="utf-8")
    simulated = ("run.toml", "--simulate", "--scenario", "service.toml")
    plan = quantroute("plan", *simulated)
    save(Text.from_ansi(plan), "plan.svg", title="quantroute plan run.toml")
    _progress.Live = Camera  # type: ignore[misc]
    with contextlib.suppress(SystemExit):  # with the code for a cap that is reached
        main(["generate", *simulated])
    view = next(item for item in Camera.views if item.posted_pusd >= MOMENT * item.cap_pusd)
    save(view, "live.svg", title="quantroute generate run.toml")
    quantroute("report", "kimi-k25-simulated")
    page_picture(Path("kimi-k25-simulated/report.html").resolve())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        make()
