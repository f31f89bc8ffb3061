"""The side of scikit-learn: its MLP, which holds validation samples out by itself, or several, a process a core."""

import numpy as np
from sklearn.ensemble import BaggingClassifier, BaggingRegressor
from sklearn.neural_network import MLPClassifier, MLPRegressor


def fit(data, options):
    parts = ("train", "validation")
    x, y = (np.concatenate([data[f"{part}_{own}"] for part in parts]) for own in "xy")
    has_classes = y.dtype.kind == "i"
    kind, several = (MLPClassifier, BaggingClassifier) if has_classes else (MLPRegressor, BaggingRegressor)
    model = kind(
        early_stopping=True, validation_fraction=0.2, hidden_layer_sizes=(128, 128), random_state=options["seed"]
    )
    if options["models"] > 1:  # all of the samples for each: they differ in seeds alone
        model = several(model, options["models"], bootstrap=False, n_jobs=options["threads"],
                        random_state=options["seed"])  # fmt: skip
    model.fit(x, y)
    return model.predict_proba(data["test_x"]) if has_classes else model.predict(data["test_x"])
