"""The side of TabPack, by a clone of its authors' repository, in the environment of that clone.

They offer no package yet, and the program of their paper reads its data and writes its results as files.
"""

import json
import tempfile
from pathlib import Path

import lib.experiment
import numpy as np
import project.tabpack
import torch

_PARTS = {"train": "train", "validation": "val", "test": "test"}


def fit(data, options):
    torch.set_num_threads(options["threads"])
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "table"
        write(data, table)
        config = json.loads(Path("experiments/tabpack-cosine/churn/main/config.json").read_text())
        # Of the paper's settings this one is no longer that of its code.
        config["model"]["num_embeddings"] = {"type": "CosineEmbeddingsPack"}
        config["model"]["d_block"] = options["width"]
        config["data"] |= {"path": str(table), "cache": False}
        config |= {"seed": options["seed"], "n_models": options["models"], "save_all_predictions": False}
        del config["amp_dtype"]  # float32, as all sides
        if "timeout_s" in options:
            config["timeout"] = options["timeout_s"]
            config["optimizer"]["type"] = "AdamWPack"
            del config["sampler"]["space"]["optimizer"]["muon_lr"]
        run = lib.experiment.create(Path(folder) / "run", config=config)
        report = lib.experiment.run(project.tabpack.main, None, run)
    found = report["online_ensembles"]["greedy"]["report"]["metrics"]["test"]
    if "rmse" in found:  # of targets in standard deviations
        metrics = {"rmse": found["rmse"] * float(data["std"])}
    else:
        metrics = {"log_loss": found["cross-entropy"], "auc": found["roc-auc"], "accuracy": found["accuracy"]}
    return {"metrics": metrics, "seconds": report["time"]}


def write(data, folder):
    """Write a table as TabPack reads it."""
    splits = folder / "splits" / "default"
    splits.mkdir(parents=True)
    for ours, theirs in (("raw", "x_num"), ("cat", "x_cat"), ("y", "y")):
        np.save(folder / f"{theirs}.npy", np.concatenate([data[f"{part}_{ours}"] for part in _PARTS]))
    begin = 0
    for ours, theirs in _PARTS.items():
        begin, first = begin + len(data[f"{ours}_y"]), begin
        np.save(splits / f"{theirs}.npy", np.arange(first, begin, dtype=np.int32))
    has_classes = data["train_y"].dtype.kind == "i"
    task = {"type": "binclass", "score": "cross-entropy"} if has_classes else {"type": "regression", "score": "rmse"}
    (folder / "info.json").write_text(json.dumps({"task": task}))
