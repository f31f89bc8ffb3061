"""Hyper-parameters for TensorBoard's HParams tab: its columns, a run's values, and how the run ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2, summary_v2  # type: ignore[import-untyped]

Values = Mapping[str, bool | int | float | str]

# The same for every run, as TensorBoard takes the columns from the run that it reads first.
_FIRST = ("averaging", "batch_size", "model", "num_learners", "optimizer.learning_rate")
_COLUMNS = (
    *_FIRST, "data", "num_devices", "averaging.rate_scaling", "averaging.correction_rate",
    "averaging.averaging_momentum", "averaging.averaging_period", "optimizer", "optimizer.momentum",
    "optimizer.weight_decay", "schedule", "schedule.warmup_epochs", "label_smoothing", "executor", "precision", "seed",
)  # fmt: skip
_METRICS = {
    "accuracy/test": "test accuracy",
    "loss/train": "training loss",
    "throughput/images_per_s": "images/s",
    "time/training_s": "training time, s",
    "time/to_accuracy_s": "time to accuracy, s",
}


def columns_of_runs() -> Summary:
    """Return the columns by which runs are compared, and their metrics, which are the last values of curves."""
    # TensorBoard shows these first; they hold most of what runs differ in.
    parameters = [api_pb2.HParamInfo(name=name, differs=name in _FIRST) for name in _COLUMNS]
    metrics = [api_pb2.MetricInfo(name=api_pb2.MetricName(tag=tag), display_name=_METRICS[tag]) for tag in _METRICS]
    experiment = api_pb2.Experiment(hparam_infos=parameters, metric_infos=metrics)
    return _summary(metadata.EXPERIMENT_TAG, plugin_data_pb2.HParamsPluginData(experiment=experiment))


def columns(parameters: Sequence[summary_v2.HParam], metrics: Sequence[summary_v2.Metric]) -> Summary:
    """Return the summary that lists the columns and metrics to compare."""
    return summary_v2.hparams_config_pb(parameters, metrics)


def started(values: Values, group: str, now_s: float) -> Summary:
    """Return the summary of a run's or trial's values at its start, `now_s` seconds since 1970.

    Runs with the same `group` are repetitions of one run.
    """
    return summary_v2.hparams_pb(values, group, now_s)


def ended(*, failed: bool, now_s: float) -> Summary:
    """Return the summary of how a run ended, `now_s` seconds since 1970."""
    status = api_pb2.STATUS_FAILURE if failed else api_pb2.STATUS_SUCCESS
    info = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=now_s)
    return _summary(metadata.SESSION_END_INFO_TAG, plugin_data_pb2.HParamsPluginData(session_end_info=info))


def _summary(tag: str, data: plugin_data_pb2.HParamsPluginData) -> Summary:
    about = metadata.create_summary_metadata(data)
    return Summary(value=[Summary.Value(tag=tag, metadata=about, tensor=metadata.NULL_TENSOR)])
