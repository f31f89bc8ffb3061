"""What TensorBoard compares runs by."""

from __future__ import annotations

from tensorboard.plugins.hparams.metadata import parse_experiment_plugin_data

from crossbow_py.telemetry.tensorboard.hyper_parameters import columns_of_runs


def test_columns_of_runs_are_the_same_for_all_and_the_first_five_are_shown_unasked() -> None:
    (value,) = columns_of_runs().value
    experiment = parse_experiment_plugin_data(value.metadata.plugin_data.content)
    assert {each.name for each in experiment.hparam_infos if each.differs} == {
        "averaging", "batch_size", "model", "num_learners", "optimizer.learning_rate",
    }  # fmt: skip
    assert len({each.name for each in experiment.hparam_infos}) == len(experiment.hparam_infos) == 20
    assert experiment.metric_infos[0].name.tag == "accuracy/test"
