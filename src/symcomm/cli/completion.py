"""``symcomm completion``: the shell completes commands, options and their values."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.completion

from symcomm import errors
from symcomm.cli.command import Command, argument, flag

app = typer.Typer(rich_markup_mode=None, add_completion=False)
_typer: Any = typer.completion  # which does not export these functions
SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_SYMCOMM_COMPLETE"  # set by a shell's script when it asks us what could come next

# Typer's script completes no options in zsh 5.9, and nothing at the first Tab, when zsh loads the installed file. Ours
# asks as fish does, and gets a line for each word: the word, a tab, its help.
ZSH = r"""#compdef symcomm
_symcomm_completion() {
  local line
  local -a found
  for line in "${(@f)$(env _SYMCOMM_COMPLETE=complete_fish _TYPER_COMPLETE_FISH_ACTION=get-args \
                       _TYPER_COMPLETE_ARGS="${words[1,$CURRENT]}" symcomm)}"; do
    [[ -n $line ]] && found+=("${${line%%$'\t'*}//:/\\:}:${line#*$'\t'}")
  done
  if (( $#found )); then _describe symcomm found; else _files; fi
}
if [[ $funcstack[1] == _symcomm ]]; then
  _symcomm_completion "$@"
else
  compdef _symcomm_completion symcomm
fi"""


@app.command(name="completion", cls=Command)
def completion(
    shell: Annotated[
        str, argument("SHELL", f"One of {', '.join(SHELLS)}. [default: the one you are in]", *SHELLS)
    ] = "",
    install: Annotated[bool, flag("--install", "Install it for this user, and say where.")] = False,
) -> None:
    """Print the script by which a shell completes commands, options and their values; or install it.

    \b
    Examples:
      symcomm completion --install
      symcomm completion zsh --install
      eval "$(symcomm completion bash)"        in this shell only
    """
    chosen = shell or _find_shell()
    if chosen not in SHELLS:
        raise errors.bad_choice("symcomm completion", "SHELL", chosen, SHELLS)
    if not install:
        typer.echo(script_for(chosen))
        return
    try:
        _, path = _typer.install(shell=chosen, prog_name="symcomm", complete_var=VARIABLE)
        path.write_text(f"{script_for(chosen)}\n")
    except OSError as error:
        fix = f"print it with `symcomm completion {chosen}` and put it where your shell looks"
        raise errors.ResourceError(f"{error.filename} cannot be written ({error.strerror}); {fix}.") from error
    typer.echo(f"{path}: open a new {chosen} and press Tab after `symcomm `.")


def script_for(shell: str) -> str:
    if shell == "zsh":
        return ZSH
    return str(_typer.get_completion_script(prog_name="symcomm", complete_var=VARIABLE, shell=shell))


def _find_shell() -> str:
    """The shell that started us, or the user's."""
    parent = Path(f"/proc/{os.getppid()}/comm").read_text().strip()
    return parent if parent in SHELLS else Path(os.environ.get("SHELL", "")).name
