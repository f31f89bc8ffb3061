"""The sizes of a convolution for all learners, and the tiles of its matrix products. Pure, without Triton."""

from __future__ import annotations

from dataclasses import dataclass, replace

_PROGRAMS = 512  # programs of a launch to aim at: a few for each multiprocessor of a large GPU
_STEPS = 8  # the least steps of a split; with fewer, adding up costs more than splitting gains
_SPLITS = 64
_WIDE, _HIGH, _HIGH_OF_SPLIT = (16, 64), (16, 128), (16, 64)  # the least and most columns and rows of a tile
_DEEP = 512  # values of a sum from which steps are longer


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


@dataclass(frozen=True)
class Tiles:
    """The tiles of a convolution's three products: outputs, the gradient of the inputs, that of the filters."""

    forward: Blocking
    inputs: Blocking
    filters: Blocking


def tiles_of(geometry: Geometry) -> Tiles:
    """Return the tiles that a convolution takes."""
    g, filters = geometry, geometry.taps * geometry.in_channels
    return Tiles(
        forward=blocking(g.out_rows, g.out_channels, filters, g.groups),
        inputs=blocking(g.in_rows, g.in_channels, g.taps * g.out_channels, g.groups),
        filters=split_blocking(g.out_channels, filters, g.out_rows, g.groups),
    )


def _power_of_two(value: int, least: int, most: int) -> int:
    return max(least, min(most, 1 << (value - 1).bit_length()))


def blocking(rows: int, columns: int, depth: int, groups: int) -> Blocking:
    """Return a tile for a product with few columns: as large as useful, smaller if there would be few programs."""
    wide, high = _power_of_two(columns, *_WIDE), _power_of_two(rows, *_HIGH)
    while high > 32 and groups * ceil_div(rows, high) * ceil_div(columns, wide) < _PROGRAMS // 4:
        high //= 2
    return Blocking(high, wide, _depth_of(depth, high, wide))


def split_blocking(rows: int, columns: int, depth: int, groups: int) -> Blocking:
    """Return a tile for a product with great depth, which is split until there are enough programs."""
    wide, high = _power_of_two(columns, *_WIDE), _power_of_two(rows, *_HIGH_OF_SPLIT)
    deep = _depth_of(depth, high, wide)
    programs = groups * ceil_div(rows, high) * ceil_div(columns, wide)
    splits = min(ceil_div(_PROGRAMS, programs), ceil_div(depth, _STEPS * deep), _SPLITS)
    return Blocking(high, wide, deep, max(1, splits))


def _depth_of(depth: int, high: int, wide: int) -> int:
    # Three steps of both factors in float32 are within the 99 KiB that a program has on compute capability 8.6 and 8.9.
    return 64 if depth >= _DEEP and high + wide <= 128 else 32


def every_blocking() -> list[Blocking]:
    """Return all tiles that `blocking` may return, from small to large."""
    return _shapes(_HIGH)


def every_split_blocking() -> list[Blocking]:
    """Return all tiles that `split_blocking` may return, with one split and with two, which stand for more."""
    return [replace(tile, splits=splits) for tile in _shapes(_HIGH_OF_SPLIT) for splits in (1, 2)]


def every_tiles() -> list[Tiles]:
    """Return tiles in which every one that a product may take is found: 36, in three groups of equal channels.

    The channels of the outputs are the columns of `forward` and the rows of `filters`, and those of the inputs are as
    many here. Among the tiles of `filters` there are more than among the others, which come again.
    """
    found = []
    for channels in _powers(*_WIDE):
        rows = [tile for tile in every_blocking() if tile.columns == channels]
        filters = [tile for tile in every_split_blocking() if tile.rows == channels]
        found += [Tiles(rows[i % len(rows)], rows[i % len(rows)], tile) for i, tile in enumerate(filters)]
    return found


def _shapes(limits: tuple[int, int]) -> list[Blocking]:
    found = {
        Blocking(high, wide, _depth_of(depth, high, wide)): None
        for high in _powers(*limits) for wide in _powers(*_WIDE) for depth in (1, _DEEP)
    }  # fmt: skip
    return list(found)


def _powers(least: int, most: int) -> list[int]:
    return [1 << power for power in range(least.bit_length() - 1, most.bit_length())]
