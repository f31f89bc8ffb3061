"""The sizes of a convolution for all learners, and the tiles of its matrix products. Pure, without Triton."""

from __future__ import annotations

from dataclasses import dataclass

_PROGRAMS = 512  # programs of a launch to aim at: a few for each multiprocessor of a large GPU
_STEPS = 8  # the least steps of a split; with fewer, adding up costs more than splitting gains
_SPLITS = 64


def ceil_div(value: int, divisor: int) -> int:
    """Return ⌈value / divisor⌉."""
    return -(-value // divisor)


@dataclass(frozen=True)
class Geometry:
    """The sizes of a convolution. `groups` are learners times a learner's groups; channels are those of a group."""

    batch: int
    groups: int
    in_channels: int
    out_channels: int
    height: int
    width: int
    kernel: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)

    @property
    def out_size(self) -> tuple[int, int]:
        """The height and width of the output."""
        sizes = zip((self.height, self.width), self.kernel, self.stride, self.padding, self.dilation, strict=True)
        high, wide = ((size + 2 * p - d * (k - 1) - 1) // s + 1 for size, k, s, p, d in sizes)
        return high, wide

    @property
    def out_rows(self) -> int:
        """The pixels of the outputs of all images."""
        return self.batch * self.out_size[0] * self.out_size[1]

    @property
    def in_rows(self) -> int:
        """The pixels of the inputs of all images."""
        return self.batch * self.height * self.width

    @property
    def taps(self) -> int:
        """The number of positions of a filter, KH·KW."""
        return self.kernel[0] * self.kernel[1]

    def constants(self) -> dict[str, int]:
        """Return the sizes as constants of kernels, without the groups: those grow with the learners."""
        high, wide = self.out_size
        pixels = max(self.height * self.width * self.in_channels, high * wide * self.out_channels)
        assert pixels * self.groups < 2**31, "kernels count the values of an image, of all groups, in 32 bits"
        return {
            "C": self.in_channels, "O": self.out_channels, "H": self.height, "W": self.width,
            "OH": high, "OW": wide, "KH": self.kernel[0], "KW": self.kernel[1], "SY": self.stride[0],
            "SX": self.stride[1], "PY": self.padding[0], "PX": self.padding[1], "DY": self.dilation[0],
            "DX": self.dilation[1],
        }  # fmt: skip


@dataclass(frozen=True)
class Blocking:
    """A tile of a product: rows, columns and depth, powers of two from 16 on, and the number of splits of the depth."""

    rows: int
    columns: int
    depth: int
    splits: int = 1

    def tiles(self, rows: int, columns: int) -> int:
        """Return the number of tiles of a group's product, without splits."""
        return ceil_div(rows, self.rows) * ceil_div(columns, self.columns)


def _power_of_two(value: int, least: int, most: int) -> int:
    return max(least, min(most, 1 << (value - 1).bit_length()))


def blocking(rows: int, columns: int, depth: int, groups: int) -> Blocking:
    """Return a tile for a product with few columns: as large as useful, smaller if there would be few programs."""
    wide, high = _power_of_two(columns, 16, 64), _power_of_two(rows, 16, 128)
    while high > 32 and groups * ceil_div(rows, high) * ceil_div(columns, wide) < _PROGRAMS // 4:
        high //= 2
    return Blocking(high, wide, _depth_of(depth, high, wide))


def split_blocking(rows: int, columns: int, depth: int, groups: int) -> Blocking:
    """Return a tile for a product with great depth, which is split until there are enough programs."""
    wide, high = _power_of_two(columns, 16, 64), _power_of_two(rows, 16, 64)
    deep = _depth_of(depth, high, wide)
    programs = groups * ceil_div(rows, high) * ceil_div(columns, wide)
    splits = min(ceil_div(_PROGRAMS, programs), ceil_div(depth, _STEPS * deep), _SPLITS)
    return Blocking(high, wide, deep, max(1, splits))


def _depth_of(depth: int, high: int, wide: int) -> int:
    # Three steps of both factors in float32 are within the 99 KiB that a program has on compute capability 8.6 and 8.9.
    return 64 if depth >= 512 and high + wide <= 128 else 32
