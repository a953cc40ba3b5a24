"""The environment that commands run in: few variables of the host, those that were set for the command, and grants.

    inherited    by an allow-list of names, and only if the name does not look like that of a secret
    env          set by the caller and stored with the command; a name that looks like a secret's is refused there
    grants       named by the caller: the value is the host's own, or was given, and is not stored

What is granted with a value is in the memory of the Runtime that was asked until the command has begun. If that Runtime
dies before, the next one takes the value from its own environment, or the command does not begin.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from perdure.errors import InvalidCommand
from perdure.model.command import Command

INHERITED = frozenset(
    {
        "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TERM", "COLORTERM", "TZ", "TMPDIR", "TEMP",
        "TMP", "EDITOR", "VISUAL", "PAGER", "NO_COLOR", "FORCE_COLOR", "CI", "HOSTNAME", "DISPLAY", "WAYLAND_DISPLAY",
        "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "XDG_RUNTIME_DIR", "VIRTUAL_ENV",
        "CONDA_PREFIX", "PYENV_ROOT", "NVM_DIR", "CARGO_HOME", "RUSTUP_HOME", "GOPATH", "GOROOT", "JAVA_HOME",
        "SSL_CERT_FILE", "SSL_CERT_DIR", "LD_LIBRARY_PATH",
    }
)  # fmt: skip
INHERITED_PREFIXES = ("LC_",)

_SECRET = re.compile(
    r"(^|_)(API_?KEYS?|ACCESS_?KEYS?|PRIVATE_?KEYS?|KEY|KEYS|TOKENS?|SECRETS?|PASSWORDS?|PASSWD|PASSPHRASE|PWD|"
    r"CREDENTIALS?|CREDS|AUTH|AUTHORIZATION|BEARER|COOKIE|DSN|PAT)(_|$)"
    r"|APIKEY|SECRET|PASSWORD|TOKEN$|_URL$|_URI$",
    re.IGNORECASE,
)
_HARMLESS = frozenset({"PWD", "OLDPWD", "SSH_AUTH_SOCK"})


def looks_secret(name: str) -> bool:
    """Whether a variable of this name may hold a secret."""
    return name not in _HARMLESS and _SECRET.search(name) is not None


def check_names(command: Command) -> None:
    """Refuse values in `env` that are likely to be secrets: what is in `env` is stored, and shown to whoever may see
    the command."""
    secret = next((name for name in command.env if looks_secret(name) and not _is_address(name, command)), None)
    if secret is not None:
        raise InvalidCommand(
            f"env: {secret!r} looks like the name of a secret, and env is stored: grant it instead, "
            f"grants=[{secret!r}] for the host's own value or grants={{{secret!r}: value}}; grants are not stored"
        )


def _is_address(name: str, command: Command) -> bool:
    """An address without a user and a password in it, under a name that may hold one."""
    return name.upper().endswith(("_URL", "_URI")) and "@" not in command.env[name]


def environment(
    command: Command, host: Mapping[str, str], values: Mapping[str, str], inherit: Iterable[str] = ()
) -> dict[str, str]:
    """The variables that a command has. Raises InvalidCommand when one that was granted has no value."""
    allowed = INHERITED.union(inherit)
    found = {
        name: value
        for name, value in host.items()
        if (name in allowed or name.startswith(INHERITED_PREFIXES)) and (not looks_secret(name) or name in inherit)
    }
    found.update(command.env)
    for name in command.grants:
        value = values.get(name, host.get(name))
        if value is None:
            raise InvalidCommand(
                f"grants: {name!r} has no value: it is not in the environment of this Runtime, and a value that was "
                "given with the command is not stored"
            )
        found[name] = value
    return found
