"""Shell completion: static scripts for bash, zsh and fish.

The words come from the commands and their option dataclasses, so that new options are included.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, get_args, get_origin

from transformer_vq.cli.arguments import has_run_config, option_types
from transformer_vq.cli.messages import is_flag
from transformer_vq.presets import PRESETS

SHELLS = ("bash", "zsh", "fish")

POSITIONAL = {
    "prepare": ("--dataset",),
    "export": ("--folder",),
    "plot": ("--paths",),
    "runs": ("--folder",),
}
"""Fields that are not options."""
WITH_PRESET = ("train", "info", "config")
NO_FILES = ("", "train", "prepare")
"""Commands whose first word is not a file; the empty name is `tvq` itself."""


@dataclass(frozen=True)
class Words:
    """What can follow a command: words in the first place, options, and values of options."""

    first: tuple[str, ...]
    options: tuple[str, ...]
    choices: dict[str, tuple[str, ...]]


def completion_script(shell: str) -> str:
    """Return the completion script for one of SHELLS."""
    write = {"bash": _bash, "zsh": _zsh, "fish": _fish}
    return write[shell](_words_by_command())


def option_classes() -> dict[str, Any]:
    """Return the option dataclass of every command."""
    from transformer_vq.cli.main import COMMANDS

    return {
        name: getattr(import_module(module), f"{name.title()}Options")
        for name, (module, _) in COMMANDS.items()
    }


def _words_by_command() -> dict[str, Words]:
    """Return the words of every command; the empty name is `tvq` itself."""
    from transformer_vq.cli.main import COMMANDS
    from transformer_vq.cli.resume import FIXED_FIELDS

    top = ("--help", "--version", "--print-completion")
    found = {"": Words((*COMMANDS, *top), (), {"--print-completion": SHELLS})}
    fixed = {f"--{name.replace('_', '-')}" for name in FIXED_FIELDS}
    for command, kind in option_classes().items():
        options, choices = [], {}
        first = tuple(PRESETS) if command in WITH_PRESET else ()
        for name, hint in option_types(kind).items():
            if command == "resume" and name in fixed:
                continue
            if name in POSITIONAL.get(command, ()):
                first = _choices(hint)
                continue
            options.append(name)
            if is_flag(hint):
                options.append(_negated(name))
            if _choices(hint):
                choices[name] = _choices(hint)
        helps = ("--help", "--help-all") if has_run_config(kind) else ("--help",)
        found[command] = Words(first, (*options, *helps), choices)
    return found


def _choices(hint: Any) -> tuple[str, ...]:
    """Return the values that a type allows if they are words, else an empty tuple."""
    if get_origin(hint) is Literal:
        return tuple(map(str, get_args(hint)))
    return next((found for inner in get_args(hint) if (found := _choices(inner))), ())


def _negated(option: str) -> str:
    section, dot, name = option.removeprefix("--").rpartition(".")
    return f"--{section}{dot}no-{name}"


def _cases(words: dict[str, Words], indent: str) -> str:
    """Return shell cases that set `first`, `options` and, for the previous word, `values`."""
    lines = []
    for command, found in words.items():
        lines.append(f'"{command}")')
        lines.append(f"  first='{' '.join(found.first)}'")
        lines.append(f"  options='{' '.join(found.options)}'")
        if found.choices:
            lines.append('  case "$previous" in')
            lines += [f"    {x}) values='{' '.join(y)}' ;;" for x, y in found.choices.items()]
            lines.append("  esac")
        lines.append("  ;;")
    return "\n".join(indent + line for line in lines)


def _bash(words: dict[str, Words]) -> str:
    return f"""\
# bash completion for tvq; load it with: source <(tvq --print-completion bash)
_tvq() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}"
  local command="" place=1 first="" options="" values=""
  if (( COMP_CWORD > 1 )) && [[ "${{COMP_WORDS[1]}}" != -* ]]; then
    command="${{COMP_WORDS[1]}}" place=2
  fi
  case "$command" in
{_cases(words, "    ")}
  esac
  if [[ -z "$values" ]]; then
    if [[ "$current" == -* ]]; then
      values="$options"
    fi
    if (( COMP_CWORD == place )); then
      values="$first $values"
    fi
  fi
  COMPREPLY=($(compgen -W "$values" -- "$current"))
}}
complete -o default -F _tvq tvq
"""


def _zsh(words: dict[str, Words]) -> str:
    return f"""\
#compdef tvq
# zsh completion for tvq; load it with: source <(tvq --print-completion zsh)
_tvq() {{
  local current="${{words[CURRENT]}}" previous="${{words[CURRENT-1]}}"
  local command="" place=2 first="" options="" values=""
  if (( CURRENT > 2 )) && [[ "${{words[2]}}" != -* ]]; then
    command="${{words[2]}}" place=3
  fi
  case "$command" in
{_cases(words, "    ")}
  esac
  if [[ -n "$values" ]]; then
    compadd -- ${{=values}}
    return
  fi
  if [[ "$current" == -* ]]; then
    compadd -- ${{=options}}
  fi
  if (( CURRENT == place )); then
    compadd -- ${{=first}}
    case "$command" in
      {"|".join(name or '""' for name in NO_FILES)}) return ;;
    esac
  fi
  _files
}}
if [[ "${{funcstack[1]}}" == _tvq ]]; then  # loaded from a folder in fpath
  _tvq "$@"
else
  if (( ! ${{+functions[compdef]}} )); then
    autoload -Uz compinit && compinit
  fi
  compdef _tvq tvq
fi
"""


def _fish(words: dict[str, Words]) -> str:
    lines = [
        "# fish completion for tvq; load it with: tvq --print-completion fish | source",
        "function __tvq_command  # the words before the cursor start with these",
        "  set -l before (commandline -opc)",
        '  string match -q -- "tvq $argv *" "$before "',
        "end",
        "function __tvq_first  # the cursor is at the first word after these",
        "  set -l before (commandline -opc)",
        '  test "$before" = (string trim -- "tvq $argv")',
        "end",
        "function __tvq_top  # there is no command yet",
        "  set -l before (commandline -opc)",
        "  not string match -qr -- '^tvq [a-z]' \"$before\"",
        "end",
    ]
    for option, values in words[""].choices.items():
        name = option.removeprefix("--")
        lines.append(f"complete -c tvq -n __tvq_top -l {name} -x -a '{' '.join(values)}'")
    for command, found in words.items():
        if found.first:
            first = " ".join(found.first)
            no_files = " -f" if command in NO_FILES else ""
            lines.append(f"complete -c tvq -n '__tvq_first {command}'{no_files} -a '{first}'")
        for option in found.options:
            values = found.choices.get(option, ())
            more = f" -x -a '{' '.join(values)}'" if values else ""
            name = option.removeprefix("--")
            lines.append(f"complete -c tvq -n '__tvq_command {command}' -l {name}{more}")
    return "\n".join(lines) + "\n"
