"""Makes the pictures of TensorBoard and of a report that the documentation shows, by headless Chromium.

    python docs/screenshots.py            # trains three runs of LeNet on MNIST first, some minutes
    python docs/screenshots.py --runs DIR # of runs that are there: DIR/runs holds them
    python docs/screenshots.py --ranks    # only of a run of eight ranks, whose events are made up

Chromium is looked for on the path, or in $CHROMIUM.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
RUNS = {
    "sma_of_4": ["num_learners=4", "averaging=sma"],
    "gradients_of_2": ["num_learners=2", "averaging=synchronous_sgd_sqrt"],
    "auto": ["num_learners=auto", "averaging=sma"],
}
COMMON = ["+experiment=lenet", "max_epochs=3", "executor=threads", "trace=true"]
# What of TensorBoard is shown: the part of the address behind #, and the size of the window.
PAGES = {
    "tensorboard": ("custom_scalars", (1500, 1430)),
    "tensorboard_images": ("images", (1500, 700)),
    "tensorboard_hparams": ("hparams", (1500, 560)),
}
RANKS, RANKS_PAGE = "tensorboard_ranks", ("custom_scalars", (1500, 3000))
REPORTS = {"report": 1640, "report_top": 800}  # the page and its beginning, as high as that
CONFUSION = "confusion_matrix"  # of the first run, a picture of the report
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
_PAGE_MS = 20_000  # of the page's own clock, in which it loads everything
_START_S = 60.0
_COLOURS = 128  # of a picture: a quarter of the bytes, and no difference to see


def browser() -> str | None:
    """The program, or None."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)


@contextmanager
def tensorboard(logdir: Path) -> Iterator[str]:
    """TensorBoard over a folder on a free port of this machine alone, until the block is left. Gives its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # The page shows the folder as it is given, so without where that lies.
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", logdir.name, "--port", str(port)]
    process = subprocess.Popen(
        [*command, "--host", "127.0.0.1"], cwd=logdir.parent, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        address = f"http://127.0.0.1:{port}/"
        _await(f"{address}data/runs")
        yield address
    finally:
        process.terminate()
        process.wait()


def _await(url: str) -> None:
    """Until TensorBoard answers and has read runs."""
    end = time.monotonic() + _START_S
    while time.monotonic() < end:
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                if answer.read().strip() not in (b"", b"[]"):
                    return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.5)
    raise SystemExit(f"error: {url} did not answer within {_START_S:.0f} s.")


def screenshot(url: str, path: Path, size: tuple[int, int]) -> None:
    """Load a page in a window of that size and keep what it looks like."""
    program = browser()
    if program is None:
        raise SystemExit(f"error: none of {', '.join(BROWSERS)} is there; install one, or set CHROMIUM to its path.")
    with tempfile.TemporaryDirectory() as profile:
        command = [
            program, *_FLAGS, f"--user-data-dir={profile}", f"--window-size={size[0]},{size[1]}",
            f"--virtual-time-budget={_PAGE_MS}", f"--screenshot={path}", url,
        ]  # fmt: skip
        subprocess.run(command, check=True, timeout=180, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _reduce(path, path)


def _reduce(source: Path, path: Path) -> None:
    Image.open(source).convert("RGB").quantize(_COLOURS).save(path, optimize=True)


def train(folder: Path) -> None:
    """The runs that are shown."""
    for name, overrides in RUNS.items():
        command = [sys.executable, "-m", "crossbow_py.train", *COMMON, *overrides, f"output_dir=runs/{name}"]
        subprocess.run(command, cwd=folder, check=True)


def made_up_ranks() -> None:
    """The dashboard of a run of eight ranks, each with a GPU: no machine here has as many."""
    with tempfile.TemporaryDirectory() as made:
        command = [sys.executable, "-m", "tests.made_up_ranks", "8", str(Path(made) / "runs" / "eight_gpus")]
        subprocess.run(command, cwd=ROOT, check=True)
        with tensorboard(Path(made) / "runs") as address:
            page, size = RANKS_PAGE
            screenshot(f"{address}#{page}", IMAGES / f"{RANKS}.png", size)


def main(argv: Sequence[str] | None = None) -> int:
    """Train where nothing is given, and make every picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--runs", type=Path, metavar="DIR", help="folder whose runs/ holds the runs to show")
    parser.add_argument("--ranks", action="store_true", help="make only the picture of a run of eight ranks")
    options = parser.parse_args(argv)
    made_up_ranks()
    if options.ranks:
        print(f"written to {IMAGES.relative_to(ROOT)}: {RANKS}")
        return 0
    with tempfile.TemporaryDirectory() as made:
        folder = options.runs or Path(made)
        if options.runs is None:
            train(folder)
        with tensorboard(folder / "runs") as address:
            for name, (page, size) in PAGES.items():
                screenshot(f"{address}#{page}", IMAGES / f"{name}.png", size)
        report = [sys.executable, "-m", "crossbow_py.report", *(f"runs/{name}" for name in RUNS), "output_dir=report"]
        subprocess.run(report, cwd=folder, check=True)
        for name, height in REPORTS.items():
            screenshot((folder / "report" / "report.html").resolve().as_uri(), IMAGES / f"{name}.png", (1200, height))
        _reduce(folder / "report" / "confusion_0.png", IMAGES / f"{CONFUSION}.png")
    print(f"written to {IMAGES.relative_to(ROOT)}: {', '.join([*PAGES, RANKS, *REPORTS, CONFUSION])}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
