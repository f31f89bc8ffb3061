"""Images a second a core that are decoded, cropped and resized, beside those of plain Pillow.

    python experiments/loader/run.py [--folder flowers_300 --size 224 --resize 256] [--json PATH]

README.md says what is compared and how.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # a checkout is enough, installed or not

from crossbow_py.core.errors import UserError
from experiments.bench.arguments import count, measuring_parser, positive
from experiments.bench.machine import machine
from experiments.bench.results import show_and_write
from experiments.loader.measure import measure_loader
from experiments.loader.report import result_text


def main(argv: Sequence[str] | None = None) -> int:
    parser = measuring_parser(__doc__)
    add = parser.add_argument
    add("--folder", default="flowers_300", help="the images: a path, or a name in $CROSSBOW_DATA_DIR (%(default)s)")
    add("--size", type=count, default=224, help="height and width of crops (default %(default)s)")
    add("--resize", type=count, default=256, help="short side of cached images (default %(default)s)")
    add("--seconds", type=positive, default=60.0, help="of measuring (default %(default)s)")
    options = parser.parse_args(argv)
    try:
        with tempfile.TemporaryDirectory() as caches:
            measured = measure_loader(options.folder, options.size, options.resize, options.seconds, Path(caches))
    except UserError as error:
        parser.error(str(error))
    result = {"machine": machine(), **measured}
    show_and_write(result, result_text, options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
