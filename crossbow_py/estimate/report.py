"""An estimate as text, as plain values in estimate.json, and as a picture."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from crossbow_py.core.errors import unwritable
from crossbow_py.core.host import versions
from crossbow_py.core.printing import columns
from crossbow_py.engine.sizing.memory import breakdown
from crossbow_py.estimate.estimation import MOST_ADAPTERS, Estimate
from crossbow_py.estimate.units import in_words
from crossbow_py.telemetry.pictures.files import INSTALL_MATPLOTLIB, has_matplotlib, save_picture
from crossbow_py.telemetry.records import write_json
from crossbow_py.train.config import config_to_mapping

JSON_FILE, PLOT_FILE = "estimate.json", "estimate.png"
_POINTS = 200


def as_text(found: Estimate) -> str:
    """Return the text for the user."""
    blocks = [_head(found), _answer(found), _table(found), _parts(found), _limits(found)]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _head(found: Estimate) -> list[str]:
    config = found.config
    limit = in_words(found.limit_bytes)
    lines = [
        f"{config.experiment}: model={config.model.NAME} data={config.data.NAME} precision={found.precision.name} "
        f"executor={config.executor}",
        f"memory {in_words(found.memory_bytes)}, {limit} of it usable. Held back: {found.held_back.why}.",
    ]
    if found.measured is not None:
        tried = ", ".join(f"{b} {'out of memory' if size is None else in_words(size)}" for b, size in
                          found.measured.points)  # fmt: skip
        lines.append(f"measured by real rounds with {found.num_learners} learners, batch sizes: {tried}; the rest is")
        lines.append("predicted from two probes under fake tensors, in the measure of what was confirmed.")
    else:
        probes = " and ".join(f"{size} ({in_words(peak)})" for size, peak in found.model.activations.probes)
        lines.append(f"predicted, not measured: one learner's pass counted under fake tensors at batch sizes {probes}.")
    return [*lines, *found.notes]


def _answer(found: Estimate) -> list[str]:
    config, k, recommended = found.config, found.num_learners, found.recommendation
    learners = f"{k} learner{'s' if k > 1 else ''}"
    changes = isinstance(config.num_learners, str)
    learners += f" (the most that num_learners={config.num_learners} may take)" if changes else ""
    if recommended is None:
        needed = in_words(found.model.predicted_bytes(1, k, found.at_once))
        return [f"Nothing fits: {learners} need {needed} even with batch_size=1. Take fewer learners or more memory."]
    b, most = config.batch_size, max(k, config.max_learners)
    needed = in_words(found.model.predicted_bytes(b, k, found.at_once))
    fits = found.fitting_learners
    many = f"at least {fits}" if fits >= most else f"{fits}"
    fit = "fits" if b <= recommended.batch_size or fits >= k else "does not fit"
    return [
        f"With {learners}: batch_size={recommended.batch_size} num_workers={recommended.num_workers}",
        *(f"  {sentence}" for sentence in recommended.sentences),
        f"With batch_size={b} as configured: {many} learner{'s fit' if fits != 1 else ' fits'}; "
        f"{learners} need {needed}, which {fit}.",
        *_adapters(found),
    ]


def _adapters(found: Estimate) -> list[str]:
    """Return how many adapters fit over one base, if the model has some."""
    count, sizes, b = found.fitting_adapters, found.model.sizes, found.config.batch_size
    if count is None:
        return []
    base = f"one base of {sizes.num_frozen:,} values, {in_words(sizes.base_bytes(1))}"
    many = f"{'at least ' if count >= MOST_ADAPTERS else ''}{count:,} adapter{'s fit' if count != 1 else ' fits'}"
    each = in_words(_predicted(found, b, 2) - _predicted(found, b, 1))
    return [f"In crossbow_py.many {many} over {base}, with batch_size={b}; each further one takes {each}."]


def _table(found: Estimate) -> list[str]:
    rows = [
        (str(k), f"{size:,}{'+' if size == found.model.most else ''}", in_words(_predicted(found, size, k)))
        for k, size in found.table.items()
    ]
    return ["The largest batch size a learner:", *columns(("learners", "batch_size", "memory"), rows)] if rows else []


def _parts(found: Estimate) -> list[str]:
    size, k = found.config.batch_size, found.num_learners
    parts = breakdown(found.model, size, k, found.at_once)
    per_image = in_words(found.model.activations.per_sample)
    title = f"Memory of {k} learner{'s' if k > 1 else ''} with batch_size={size}; each further image takes {per_image}:"
    return [title, *columns(("what for", "memory"), [(name, in_words(part)) for name, part in parts.items()])]


def _limits(found: Estimate) -> list[str]:
    host = found.host
    shared = "no /dev/shm" if host.shared_bytes is None else f"{in_words(host.shared_bytes)} in /dev/shm"
    lines = [f"This machine: {host.cores} usable cores, {in_words(host.memory_bytes)} free, {shared}."]
    if not found.loading.resident:
        seconds = {"training": found.loading.step_s, "a worker": found.loading.fetch_s}
        rates = [f"{what} {1 / s:,.0f} images/s" if s else f"{what} not measured" for what, s in seconds.items()]
        lines.append(f"Speed: {', '.join(rates)}.")
    return [*lines, f"It took {found.seconds:.1f} s."]


def _predicted(found: Estimate, batch_size: int, num_learners: int) -> int:
    return found.model.predicted_bytes(batch_size, num_learners, 1 if found.in_turn else num_learners)


def as_plain(found: Estimate) -> dict[str, Any]:
    """Return everything as plain values; sizes in bytes."""
    model, size, recommended = found.model, found.config.batch_size, found.recommendation
    return {
        "experiment": found.config.experiment,
        "method": found.method,
        "precision": found.precision.name,
        "memory_bytes": found.memory_bytes,
        "limit_bytes": int(found.limit_bytes),
        "held_back": found.held_back.why,
        "num_learners": found.num_learners,
        "learners_in_turn": found.in_turn,
        "batch_size": size,
        "predicted_bytes": model.predicted_bytes(size, found.num_learners, found.at_once),
        "fitting_learners": found.fitting_learners,
        "fitting_adapters": found.fitting_adapters,
        "breakdown_bytes": dict(breakdown(model, size, found.num_learners, found.at_once)),
        "activation_lines": [[line.fixed, line.per_sample] for line in model.activations.lines],
        "probes": [list(probe) for probe in model.activations.probes],
        "table": [
            {"num_learners": k, "batch_size": b, "predicted_bytes": _predicted(found, b, k)}
            for k, b in found.table.items()
        ],
        "measured": None if found.measured is None else [list(point) for point in found.measured.points],
        "recommendation": None if recommended is None else {
            "num_learners": found.num_learners,
            "batch_size": recommended.batch_size,
            "num_workers": recommended.num_workers,
            "limits": list(recommended.limits),
            "sentences": list(recommended.sentences),
        },
        "sample_bytes": found.loading.sample_bytes,
        "resident": found.loading.resident,
        "fetch_s_per_sample": found.loading.fetch_s,
        "step_s_per_sample": found.loading.step_s,
        "host": dataclasses.asdict(found.host),
        "notes": list(found.notes),
        "seconds": found.seconds,
        "config": config_to_mapping(found.config),
        "versions": versions(),
    }  # fmt: skip


def write(found: Estimate, folder: Path) -> list[str]:
    """Write estimate.json and, with matplotlib, estimate.png; returns sentences on what was written.

    Raises UserError when the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / JSON_FILE, as_plain(found))
        if drawn := has_matplotlib():
            _draw(found, folder / PLOT_FILE)
    except OSError as error:
        raise unwritable(folder, error) from error
    if drawn:
        return [f"Written to {folder / JSON_FILE} and {folder / PLOT_FILE}."]
    return [f"Written to {folder / JSON_FILE}.", f"No picture: {INSTALL_MATPLOTLIB}"]


def _draw(found: Estimate, path: Path) -> None:
    from matplotlib.figure import Figure  # noqa: PLC0415  an extra

    end = max(found.recommendation.batch_size if found.recommendation else 1, found.config.batch_size)
    sizes = sorted({max(1, round(end * 1.15 * step / _POINTS)) for step in range(_POINTS + 1)})
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for k in sorted({1, found.num_learners}):
        predicted = [_predicted(found, size, k) / 2**30 for size in sizes]
        axes.plot(sizes, predicted, label=f"predicted, {k} learner{'s' if k > 1 else ''}")
    if found.measured is not None:
        points = [(size, taken / 2**30) for size, taken in found.measured.points if taken is not None]
        axes.plot(*zip(*points, strict=True), "o", label=f"measured, {found.num_learners} learners")
    axes.axhline(found.limit_bytes / 2**30, color="tab:red", linestyle="--", label="to use")
    axes.axhline(found.memory_bytes / 2**30, color="tab:red", label="memory")
    axes.set(
        xlabel="batch size a learner", ylabel="memory, GiB", title=f"{found.config.experiment}: memory", ylim=(0, None)
    )
    axes.legend()
    save_picture(figure, path)
