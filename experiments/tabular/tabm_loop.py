"""The side of TabM: its package's model of 32 members, trained as its example does."""

import copy
import math

import torch
from rtdl_num_embeddings import PiecewiseLinearEmbeddings, compute_bins
from tabm import TabM
from torch import nn

_PATIENCE = 16


def fit(data, options):
    torch.manual_seed(options["seed"])
    torch.set_num_threads(options["threads"])
    parts = {
        part: [torch.from_numpy(data[f"{part}_{own}"]) for own in ("num", "cat", "y")]
        for part in ("train", "validation", "test")
    }
    num, cat, y = parts["train"]
    classes = 0 if y.is_floating_point() else int(y.max()) + 1
    loss_of = nn.functional.cross_entropy if classes else nn.functional.mse_loss
    bins = compute_bins(num, n_bins=48)
    model = TabM.make(
        n_num_features=num.shape[1], cat_cardinalities=data["cardinalities"].tolist(), d_out=classes or 1,
        k=options["models"], d_block=options["width"],
        num_embeddings=PiecewiseLinearEmbeddings(bins, d_embedding=16, activation=False, version="B"),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=3e-4)

    @torch.inference_mode()
    def predicted(part):  # the mean of members, of probabilities where there are classes
        out = model.eval()(*parts[part][:2])
        return out.softmax(-1).mean(1) if classes else out.mean(1)[:, 0]

    least, best, waited = math.inf, model.state_dict(), 0
    for _ in range(options["epochs"]):
        model.train()
        for ids in torch.randperm(len(y)).split(256):
            optimizer.zero_grad()
            out = model(num[ids], cat[ids])
            loss_of(out.squeeze(-1).flatten(0, 1), y[ids].repeat_interleave(options["models"])).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        found, known = predicted("validation"), parts["validation"][2]
        loss = float(nn.functional.nll_loss(found.log(), known) if classes else loss_of(found, known))
        if loss < least:
            least, best, waited = loss, copy.deepcopy(model.state_dict()), 0
        elif (waited := waited + 1) > _PATIENCE:
            break
    model.load_state_dict(best)
    return predicted("test").numpy()
