"""Names that other libraries have for our keys: suggestions for the command line and for Python, from one table.

The names are those of Lightning, Keras, fastai, Hugging Face's `TrainingArguments`, plain PyTorch loops, Optuna and Ray
Tune. A word that is in no table may still be near to a key of ours by spelling, see `core.settings.suggestion`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection
from typing import Any, TypeVar

from crossbow_py.core.settings import suggestion

T = TypeVar("T")

_WORDS = {
    "optimizer.learning_rate": "lr learning_rate base_lr lr_max",
    "optimizer.momentum": "momentum",
    "optimizer.beta1": "betas",
    "optimizer.epsilon": "eps",
    "optimizer.weight_decay": "weight_decay wd l2",
    "optimizer.clip_norm": "clip_norm clipnorm grad_clip gradient_clip gradient_clip_val max_grad_norm clip_grad_norm",
    "optimizer": "opt opt_func",
    "schedule": "scheduler lr_scheduler lr_scheduler_type lr_schedule",
    "schedule.warmup_epochs": "warmup warmup_epochs warmup_steps num_warmup_steps warmup_ratio",
    "averaging.average_ema": "ema ema_decay use_ema ema_momentum swa",
    "batch_size": "batch bs per_device_train_batch_size train_batch_size per_gpu_batch_size",
    "accumulate": "accumulate_grad_batches gradient_accumulation_steps grad_accum accumulation_steps n_acc",
    "max_epochs": "epochs n_epoch n_epochs num_epochs num_train_epochs epoch",
    "max_rounds": "max_steps steps num_steps max_iters iterations steps_per_epoch",
    "max_time_s": "max_time",
    "patience": "early_stopping early_stop early_stopping_patience",
    "restore_best": "restore_best_weights load_best_model_at_end save_best_only save_best keep_best",
    "evaluations_per_epoch": "val_check_interval eval_steps eval_strategy evaluation_strategy",
    "max_evaluation_batches": "limit_val_batches validation_steps",
    "num_workers": "workers dataloader_num_workers num_proc",
    "device": "accelerator",
    "precision": "fp16 bf16 mixed_precision amp dtype",
    "compile_model": "compile torch_compile jit_compile",
    "class_weights": "class_weight pos_weight",
    "sampling": "sampler oversample weighted_sampling",
    "sample_weights": "sample_weight weighted_sampler",
    "label_smoothing": "label_smoothing_factor smoothing",
    "seed": "random_seed random_state manual_seed",
    "output_dir": "default_root_dir save_dir log_dir logdir logging_dir checkpoint_dir dirpath",
    "resume": "ckpt_path resume_from_checkpoint resume_from",
    "init_from": "pretrained weights checkpoint_path",
    "checkpoint_every_epochs": "save_every every_n_epochs save_freq save_steps save_strategy",
    "keep_checkpoints": "save_total_limit save_top_k max_to_keep",
    "data.validation_fraction": "validation_split val_split valid_pct",
    "model": "net model_fn model_init architecture arch",
    "data": "dataset dataset_name dls datamodule dataloaders",
    "train_data": "train_dataset train_dataloader train_dataloaders train_loader training_data train_dl",
    "validation_data": "val_data val_dataset eval_dataset valid_data validation_dataset val_dataloaders val_loader",
    "test_data": "test_dataset test_dataloader test_loader",
    "loss": "criterion loss_fn loss_func loss_function",
    "callbacks": "callback cbs cb",
    "logger": "loggers report_to",
}
_OURS = {word: key for key, words in _WORDS.items() for word in words.split()}

_OF_A_SEARCH = {"direction": "maximize", "pruner": "method", "scheduler": "method"}

# How a key that is a list goes on in its message.
ELSEWHERE = {
    "logger": ": what a service has to know is in its own variables, such as WANDB_PROJECT and MLFLOW_TRACKING_URI.",
}

_SEVERAL = "every device has a process of its own: start it by torchrun --nproc-per-node=N, see several_gpus.md"
_OTHERWISE = {
    **dict.fromkeys(("devices", "gpus", "num_gpus", "num_devices", "world_size", "ngpu", "n_gpu"), _SEVERAL),
    **dict.fromkeys(("strategy", "num_nodes", "distribute_strategy"), _SEVERAL),
    **dict.fromkeys(
        ("shuffle", "drop_last"), "every epoch has an order of its own, and its last batch goes on in the next epoch"
    ),
}

# How Python spells a key that the command line has in a group, and the reverse.
_OBJECTS = {"optimizer": "SGD", "schedule": "Cosine", "averaging": "SMA"}
_PYTHON = {
    "data.validation_fraction": "validation_data=...", "data": "train_data=..., test_data=...",
    "checkpoint_every_epochs": "checkpoint=CheckpointSettings(every_epochs=...)",
    "keep_checkpoints": "checkpoint=CheckpointSettings(keep=...)",
    "logger": "callbacks=[MLflowLogger()] or callbacks=[WandbLogger()]", "listeners": "callbacks=[...]",
}  # fmt: skip
_COMMAND_LINE = {
    "train_data": "data", "test_data": "data", "validation_data": "data.validation_fraction", "callbacks": "listeners",
}  # fmt: skip


def python_suggestion(word: str, of_fit: Collection[str], of_trainer: Collection[str], in_fit: bool) -> str | None:
    """Return the end of a sentence about a keyword argument that another library has, or None for an unknown word.

    Args:
        word: the argument that was given.
        of_fit, of_trainer: the arguments that `Trainer.fit` and `Trainer` take.
        in_fit: whether it was given to `fit`, not to `Trainer`.
    """
    if word in _OTHERWISE:
        return f"; {_OTHERWISE[word]}."
    key = word if word in (*of_fit, *of_trainer, *_PYTHON) else _OURS.get(word)
    if key is None:
        return None
    group, dot, name = key.partition(".")
    spelled = _PYTHON.get(key) or (f"{group}={_OBJECTS[group]}({name}=...)" if dot else f"{key}=...")
    if (key in of_fit) != in_fit:
        spelled = f"{'fit' if key in of_fit else 'Trainer'}({spelled})"
    return f"; did you mean {spelled}?"


def key_suggestion(word: str, known: Collection[str]) -> str | None:
    """Return the end of a sentence about a key of the command line that another library has, or None.

    `known` are the keys of the command.
    """
    if word in _OTHERWISE:
        return f"; {_OTHERWISE[word]}."
    key = _OURS.get(word, word)
    if _OF_A_SEARCH.get(word) in known:
        key = _OF_A_SEARCH[word]
    key = _COMMAND_LINE.get(key, key)
    if key in ("loss", "sample_weights"):
        return f"; it is for Python: Trainer({key}=...)."
    return f"; did you mean {key!r}?" if key != word and key.partition(".")[0] in known else None


def answers_other_names(group: str, cls: type[T]) -> type[T]:
    """Have the settings class of a group refuse an unknown keyword with its own name for it. Returns the class."""
    init = cls.__init__
    known = [*inspect.signature(cls).parameters]

    @functools.wraps(init)
    def checked(self: T, *args: Any, **given: Any) -> None:
        for word in given:
            if word not in known:
                _, _, name = _OURS.get(word, "").removeprefix(f"{group}.").rpartition(".")
                meant = f"; did you mean {name!r}?" if name in known else suggestion(word, known)
                raise TypeError(f"{cls.__name__}() got an unexpected keyword argument {word!r}{meant}")
        init(self, *args, **given)

    cls.__init__ = checked  # type: ignore[method-assign,assignment]
    return cls
