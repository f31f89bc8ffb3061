"""Completion of the console scripts in bash, zsh and fish: a script for the shell that holds all words.

So a press of Tab starts no Python, of which importing torch alone would take a second or two.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import suppress

from crossbow_py.cli.commands import CONFIGURED, configuration_of
from crossbow_py.cli.configuration import APPENDED_GROUPS, CommandConfig, compose, group_options, options_of
from crossbow_py.cli.flags import FLAGS
from crossbow_py.cli.help_text import Key, command_keys, group_keys, launcher_keys
from crossbow_py.cli.launchers.words import GROUP as LAUNCHER
from crossbow_py.cli.launchers.words import LAUNCHERS
from crossbow_py.core.errors import UserError
from crossbow_py.core.settings import suggestion
from crossbow_py.engine.executors import EXECUTORS

_REPORT = "crossbow-report"
_CONFIG = {"config=": "the folder of a run whose recorded configuration is to begin with"}
_PATHS = ("output_dir", "resume", "init_from", "config", "data.root", "data.folder", "data.cache_dir", "archive")

_BASH = """\
# Completion of crossbow_py's commands in bash and zsh.
_crossbow_words() {
    case "$1" in
%(cases)s
    esac
}
_crossbow_own() {  # recipes and options in conf/ of the current folder
    [ -d conf ] && [ ! -f conf/train.yaml ] || return 0  # the package's own are among the words
    case "$1" in crossbow-train|crossbow-search|crossbow-estimate) ;; *) return 0 ;; esac
    # Names with more than letters, digits and .-_ are nothing for a command line, and could be commands themselves.
    find conf -mindepth 2 -maxdepth 2 -name '*.yaml' | grep -E '^conf/[a-z]+/[A-Za-z0-9_.-]+$' | sed -E \\
        -e 's#^conf/(%(appended)s)/(.*)\\.yaml$#+\\1=\\2#' -e 's#^conf/([^/]*)/(.*)\\.yaml$#\\1=\\2#'
}
_crossbow_complete() {
    local line="${COMP_LINE:0:$COMP_POINT}"
    local word="${line##*[[:space:]]}" name="${COMP_WORDS[@]:0:1}" before="" each
    local IFS=$'\\n' globbing="$-"
    set -f  # what is offered is no pattern
    COMPREPLY=()
    # bash has taken the word apart at its last =, and replaces what is behind it alone.
    if [ -z "${ZSH_VERSION-}" ] && [[ $word == *=* ]]; then before="${word%%=*}="; fi
    case "$word" in
        %(paths)s)
            for each in $(compgen -f -- "${word#*=}"); do
                printf -v each '%%s=%%q' "${word%%%%=*}" "$each"
                COMPREPLY+=("${each#"$before"}")
            done ;;
        *)
            for each in $(_crossbow_words "${name##*/}" | tr ' ' '\\n'; _crossbow_own "${name##*/}"); do
                [[ $each == "$word"* ]] && COMPREPLY+=("${each#"$before"}")
            done
            if [ "${name##*/}" = %(report)s ]; then
                for each in $(compgen -d -- "$word"); do
                    printf -v each '%%q' "$each"
                    COMPREPLY+=("$each")
                done
            fi ;;
    esac
    [[ $globbing == *f* ]] || set +f
    if [ ${#COMPREPLY[@]} -eq 1 ] && [[ ${COMPREPLY[@]:0:1} == *= ]] && type compopt >/dev/null 2>&1; then
        compopt -o nospace  # a key waits for its value
    fi
    return 0
}
complete %(options)s-F _crossbow_complete %(names)s
"""
_ZSH = "autoload -U +X bashcompinit && bashcompinit\n"


def configurations() -> dict[str, type[CommandConfig]]:
    """Return the configuration class of each console script."""
    return {f"crossbow-{name}": configuration_of(name) for name in CONFIGURED}


def completion_script(shell: str) -> str:
    """Return the script for a shell to evaluate, for all commands at once. Raises UserError for another shell."""
    scripts = {"bash": _for_bash, "zsh": lambda: _ZSH + _for_bash("-o nospace "), "fish": _for_fish}
    if shell not in scripts:
        raise UserError(f"--completion takes a shell, got {shell!r}{suggestion(shell, scripts)}")
    return scripts[shell]()


def words(kind: type[CommandConfig]) -> dict[str, str]:
    """Return every word that may follow a command, with its meaning. A key that takes any value ends in `=`."""
    found = dict(FLAGS)
    if kind.TAKES_RECIPES:
        options = ((group, *option) for group in APPENDED_GROUPS for option in group_options(group, kind).items())
        for group, name, text in options:
            with suppress(UserError):  # which a recipe for another command raises
                compose([f"+{group}={name}"], kind)
                found[f"+{group}={name}"] = text
        found |= _CONFIG if "config=RUN" in kind.USAGE else {}
    for group in kind.GROUPS:
        found |= {f"{group}={name}": text for name, text in group_options(group, kind).items()}
    found |= {f"{LAUNCHER}={name}": text for name, text in options_of(LAUNCHER, LAUNCHERS).items()}
    grouped = [key for group in kind.GROUPS for key in group_keys(group, kind)]
    for key in [*command_keys(kind), *grouped, *launcher_keys()]:
        found |= {f"{key.name}={value}": key.meaning for value in _values(key)}
    return found


def _values(key: Key) -> Sequence[str]:
    if key.name == "executor" and not key.values.startswith("one of "):
        return ["auto", *EXECUTORS]
    if key.values.startswith("one of "):
        return key.values.removeprefix("one of ").partition(" or ")[0].split(", ")
    return ["true", "false"] if key.values == "true or false" else [""]


def _for_bash(options: str = "") -> str:
    listed = {name: " ".join(words(kind)) for name, kind in configurations().items()} | {_REPORT: "--help output_dir="}
    return _BASH % {
        "cases": "\n".join(f"        {name}) echo {shlex.quote(text)} ;;" for name, text in listed.items()),
        "appended": "|".join(APPENDED_GROUPS),
        "paths": "|".join(f"{key}=*" for key in _PATHS),
        "report": _REPORT,
        "options": options,
        "names": " ".join([*(f"crossbow-{name}" for name in CONFIGURED), _REPORT]),
    }


def _for_fish() -> str:
    lines = ["# Completion of crossbow_py's commands in fish."]
    for name, kind in configurations().items():
        lines += [f"complete -c {name} -f -a {_quoted(word)} -d {_quoted(text)}" for word, text in words(kind).items()]
    return "\n".join([*lines, f"complete -c {_REPORT} -a 'output_dir='", ""])


def _quoted(text: str) -> str:
    """Return any text in single quotes of fish, in which a backslash escapes those and itself."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
