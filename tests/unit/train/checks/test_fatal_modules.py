import pytest
import torch
from torch import nn

from crossbow_py.core.errors import UserError
from crossbow_py.train.checks.fatal_modules import refusing_fatal_modules

LAST = torch.channels_last


def images(channels: int, memory_format: torch.memory_format = LAST) -> torch.Tensor:
    return torch.zeros(2, channels, 8, 8).to(memory_format=memory_format)


def tried(module: nn.Module, inputs: torch.Tensor) -> None:
    with refusing_fatal_modules(module):
        module(inputs)


@pytest.mark.parametrize("channels", [1, 3, 7])
@pytest.mark.parametrize("stride", [2, (1, 2)])
def test_convolution_by_1_that_strides_over_few_channels_is_refused_in_channels_last_format(channels, stride):
    module = nn.Sequential(nn.Conv2d(channels, 4, 1, stride=stride))
    said = rf"^the model's 0 is a convolution by 1 x 1 with a stride over {channels} channels, .* channels_last=false"
    with pytest.raises(UserError, match=said):
        tried(module, images(channels))


def test_weights_in_channels_last_format_are_refused_with_other_inputs_too():
    with pytest.raises(UserError, match="convolution by 1 x 1"):
        tried(nn.Sequential(nn.Conv2d(3, 4, 1, stride=2)).to(memory_format=LAST), images(3, torch.contiguous_format))


def test_convolution_that_is_called_by_keyword_is_refused_too():
    class Named(nn.Sequential):
        def forward(self, images):
            return self[0](input=images)

    with pytest.raises(UserError, match="convolution by 1 x 1"):
        tried(Named(nn.Conv2d(3, 4, 1, stride=2)), images(3))


@pytest.mark.parametrize(
    ("module", "inputs"),
    [
        (nn.Conv2d(3, 4, 1, stride=2), images(3, torch.contiguous_format)),
        (nn.Conv2d(8, 4, 1, stride=2), images(8)),
        (nn.Conv2d(3, 4, 1), images(3)),
        (nn.Conv2d(3, 4, 3, stride=2), images(3)),
        (nn.Conv2d(6, 4, 1, stride=2, groups=2), images(6)),
        (nn.Conv2d(3, 4, 1, stride=2).double(), images(3).double()),
        (nn.Conv2d(3, 4, 1, stride=2).requires_grad_(False), images(3)),
    ],
)
def test_other_convolutions_are_left_alone_and_torch_survives_them(module, inputs):
    tried(module, inputs)
    output = module(inputs).sum()
    for _ in range(5 if output.requires_grad else 0):
        torch.autograd.grad(module(inputs).sum(), module.weight)


def test_group_norm_that_trains_on_what_is_frozen_is_refused_in_channels_last_format():
    module = nn.Sequential(nn.Conv2d(3, 4, 3).requires_grad_(False), nn.GroupNorm(2, 4))
    with pytest.raises(UserError, match=r"^the model.s 1 is a GroupNorm to train on what is frozen, .* freeze it\.$"):
        tried(module.to(memory_format=LAST), images(3))
    tried(module.to(memory_format=torch.contiguous_format), images(3, torch.contiguous_format))
    module[0].requires_grad_(True)
    tried(module.to(memory_format=LAST), images(3))
