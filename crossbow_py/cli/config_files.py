"""The YAML files of the configuration: finding, reading and writing them."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import ConfigTypeError, OmegaConfBaseException

from crossbow_py.core.errors import UserError
from crossbow_py.core.files import given_path, read_text
from crossbow_py.core.settings import shown, suggestion
from crossbow_py.core.version import PACKAGE

OWN_FOLDER = "conf"  # in the current folder, with options that the user adds
MOST_NESTED = 50  # levels of lists and mappings in a file or a word
FILE_ERRORS = (OmegaConfBaseException, yaml.YAMLError, OSError, ValueError, RecursionError)

_MOST_BYTES = 200_000  # read in some seconds; a run's own configuration has 3,000
_REMEDY = "restore that file, or take another folder"
_MOST_BITS = 10_000
_OPENING = (
    yaml.FlowSequenceStartToken,
    yaml.FlowMappingStartToken,
    yaml.BlockSequenceStartToken,
    yaml.BlockMappingStartToken,
)
_CLOSING = (yaml.FlowSequenceEndToken, yaml.FlowMappingEndToken, yaml.BlockEndToken)
_added_dirs: list[Path] = []  # of --config-dir: like the current folder, they hold for the whole process


def config_dir() -> Path:
    """Return the folder with the YAML files: in the package (wheel), else beside it (checkout, editable install)."""
    for folder in (PACKAGE / "conf", PACKAGE.parent / "conf"):
        if folder.is_dir():
            return folder
    raise UserError(f"no configuration folder at {PACKAGE / 'conf'} or beside it; reinstall the package.")


@contextmanager
def added_config_dir(path: str | None) -> Iterator[None]:
    """Look for options in the folder `path` too, unless it is None. Raises UserError if it is no folder."""
    if path is None:
        yield
        return
    folder = given_path("--config-dir", path).absolute()
    if not folder.is_dir():
        raise UserError(f"--config-dir must be a folder, got {shown(path)}; name one with GROUP/NAME.yaml in it.")
    _added_dirs.append(folder)
    try:
        yield
    finally:
        _added_dirs.remove(folder)


def own_config_dirs() -> list[Path]:
    """Return the user's folders of options: `conf` in the current folder, if not the package's, and added ones."""
    found = {config_dir().resolve(): config_dir()}
    for folder in (Path.cwd() / OWN_FOLDER, *_added_dirs):
        if folder.is_dir():
            found.setdefault(folder.resolve(), folder)
    return list(found.values())[1:]


def config_file(name: str, usual: str) -> tuple[Path, str]:
    """Return the folder of the file that a configuration is to begin with, and its name there.

    `usual` is the command's own. Raises UserError for a file that is not there.
    """
    name = name.removesuffix(".yaml")
    files = [path for folder in (config_dir(), *own_config_dirs()) for path in sorted(folder.glob("*.yaml"))]
    names = [path.stem for path in files]
    if name not in names:
        if name in option_files("experiment"):
            raise UserError(
                f"--config-name is a file to begin with, and {shown(name)} is a recipe; write +experiment={name}."
            )
        meant = suggestion(name, {usual, *(path.stem for path in files if path.parent != config_dir())})
        raise UserError(f"--config-name must be a file in a folder of options, got {shown(name)}{meant}")
    if (config_dir() / f"{name}.yaml").is_file() and name != usual:
        raise UserError(f"--config-name {name} is the file of another command; write python -m crossbow_py.{name}.")
    if twice := next((path for path in reversed(files) if names.count(path.stem) > 1), None):
        first = files[names.index(twice.stem)]
        raise UserError(
            f"--config-name cannot tell {first} and {twice} apart, which have one name; rename one of them."
        )
    return files[names.index(name)].parent, name


def option_files(group: str) -> dict[str, Path]:
    """Return the files of a group's options, by name: the package's, and the user's in `conf/GROUP/`."""
    folders = [config_dir(), *own_config_dirs()]
    return {name: path for folder in reversed(folders) for name, path in _in(folder, group).items()}


def check_own_option(group: str, option: str, registry: Mapping[str, type]) -> None:
    """Raise UserError for an option of the user in two folders, or with the name of one of the package.

    `registry` has the classes of the group.
    """
    files = [files[option] for folder in own_config_dirs() if option in (files := _in(folder, group))]
    names = [str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path) for path in files]
    is_ours = option in registry and registry[option].__module__.startswith(f"{PACKAGE.name}.")
    if is_ours or option in _in(config_dir(), group):
        names.insert(0, "an option of the package")
    if len(names) > 1:
        raise UserError(f"{group} {option} is both {names[0]} and {names[1]}; rename it.")


def _in(folder: Path, group: str) -> dict[str, Path]:
    return {path.stem: path for path in sorted((folder / group).glob("*.yaml")) if path.is_file()}


def write_yaml(plain: Mapping[str, Any] | Sequence[Any]) -> str:
    """Return plain values as YAML, keys in their order. Raises UserError for text with half an interpolation."""
    try:
        made: Any = dict(plain) if isinstance(plain, Mapping) else list(plain)
        return OmegaConf.to_yaml(OmegaConf.create(made))
    except OmegaConfBaseException as error:
        raise UserError(f"the configuration cannot be written ({one_line_of(error)}); leave '${{' out.") from error


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file, interpolations unresolved. Raises UserError if it is unreadable or a link."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise UserError(f"{path} must have at most {_MOST_BYTES:,} bytes, got more; {_REMEDY}.")
        text = read_text(path)
        _check_tokens(path, text)
        plain = OmegaConf.to_container(OmegaConf.load(io.StringIO(text)), resolve=False)
        _check_numbers(path, plain)
    except FILE_ERRORS as error:
        raise UserError(f"cannot read {path}: {one_line_of(error)}; {_REMEDY}.") from error
    return {str(key): value for key, value in plain.items()} if isinstance(plain, dict) else {}


def _check_tokens(path: Path, text: str) -> None:
    """Refuse tags, and aliases and deep nesting, which take far more memory or time than the file's length."""
    depth = 0
    for token in yaml.scan(text):
        if isinstance(token, yaml.AliasToken):
            raise UserError(f"{path} must have no aliases, by which few lines become gigabytes; write values out.")
        if isinstance(token, yaml.TagToken):
            raise UserError(f"{path} must have no tags, which make other things than plain values; leave them out.")
        depth += isinstance(token, _OPENING) - isinstance(token, _CLOSING)
        if depth > MOST_NESTED:
            raise UserError(f"{path} must be nested at most {MOST_NESTED} deep, got more; {_REMEDY}.")


def _check_numbers(path: Path, value: Any) -> None:
    """Refuse integers so long that Python refuses to turn them into text, as hexadecimal digits allow."""
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise UserError(f"{path} must have numbers of at most {_MOST_BITS:,} bits, got more; write a smaller one.")
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    for item in value if isinstance(value, list) else ():
        _check_numbers(path, item)


def one_line_of(error: BaseException) -> str:
    """Return an error of Hydra, OmegaConf or YAML on one line without its links, with the key of a value first."""
    if isinstance(error.__cause__, OmegaConfBaseException):  # Hydra's own text does not say why
        error = error.__cause__
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}: {error.problem}"
    if not isinstance(error, OmegaConfBaseException):
        return " ".join(str(error).split("\nSee ")[0].split())
    if isinstance(error, ConfigTypeError):
        return f"{error.full_key} is a list or a mapping, and got the other of the two"
    text = " ".join(str(error).split("\n    full_key:")[0].split())
    return f"{error.full_key}: {text}" if error.full_key else text


def first_comment(path: Path) -> str:
    """Return a file's first comment; empty without one, or if the file, which may not be needed, cannot be read."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    comments = (line.lstrip("# ").rstrip() for line in lines if line.startswith("#"))
    return next((comment for comment in comments if not comment.startswith("@")), "")
