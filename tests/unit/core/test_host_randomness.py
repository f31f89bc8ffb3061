"""Generators of the process: every draw shows, none outlasts the block that keeps them, and no GPU is looked at."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from crossbow_py.core.host_randomness import host_state, kept_generators, kept_host_state
from tests.trainers import image_model, images, make_trainer

DRAWS = {"random": random.random, "gauss": lambda: random.gauss(0, 1), "rand": np.random.rand, "randn": np.random.randn}


@pytest.mark.parametrize("name", DRAWS)
def test_every_draw_changes_the_state(name):
    with kept_host_state():
        np.random.seed(0)
        states = []
        for _ in range(5):
            states.append(host_state())
            DRAWS[name]()
    assert len(set(states)) == 5


@pytest.mark.parametrize("name", DRAWS)
def test_what_was_drawn_inside_is_drawn_again(name):
    DRAWS[name]()
    with kept_host_state():
        inside = [DRAWS[name]() for _ in range(3)]
    assert [DRAWS[name]() for _ in range(3)] == inside


@pytest.fixture
def looked_at(monkeypatch):
    """The devices whose generators are read, of a machine with eight GPUs."""
    devices = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: devices.append(device) or f"that of {device}")
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: devices.append((state, device)))
    return devices


def test_generators_of_the_cpu_and_of_one_device_are_kept_and_no_others(looked_at):
    device = torch.device("cuda", 3)
    torch.rand(1)
    with kept_generators(device):
        inside = torch.rand(3), random.random()
    assert torch.equal(torch.rand(3), inside[0])
    assert random.random() == inside[1]
    assert looked_at == [device, (f"that of {device}", device)]
    with kept_generators(torch.device("cpu")), kept_generators():
        pass
    assert len(looked_at) == 2


def test_run_on_a_cpu_looks_at_no_gpus_generators(looked_at):
    trainer = make_trainer(model=image_model, train_data=images(24), executor="auto", device="cpu")
    trainer.fit(max_rounds=2)
    assert looked_at == []
