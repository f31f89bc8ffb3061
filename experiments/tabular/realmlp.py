"""The side of RealMLP, by pytabkit: several models as one, with its own preprocessing."""

import numpy as np
import pandas as pd
from pytabkit import RealMLP_TD_Classifier, RealMLP_TD_Regressor


def fit(data, options):
    common = {"n_ens": options["models"], "n_epochs": options["epochs"], "random_state": options["seed"],
              "device": "cpu", "n_threads": options["threads"]}  # fmt: skip
    known = [part for name in ("train", "validation") for part in (frame(data, name), data[f"{name}_y"])]
    if data["train_y"].dtype == np.float32:
        return RealMLP_TD_Regressor(**common).fit(*known).predict(frame(data, "test"))
    # What its documentation says to set for those who care about cross-entropy.
    model = RealMLP_TD_Classifier(val_metric_name="cross_entropy", use_ls=False, **common)
    return model.fit(*known).predict_proba(frame(data, "test"))


def frame(data, part):
    columns = {f"number {n}": own for n, own in enumerate(data[f"{part}_raw"].T)}
    return pd.DataFrame(columns | {f"category {n}": pd.Categorical(own) for n, own in enumerate(data[f"{part}_cat"].T)})
