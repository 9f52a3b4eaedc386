"""Merges the sources of settings into one Config. Rising precedence:

    defaults < file < file's role table < PD_SERVE_<SECTION>_<KEY> < flags < --set KEY=VALUE < --set ROLE.KEY=VALUE

KEY is as in the file: `kv.block_size`. ROLE is one of the tables that override per role: prefill, decode, colocated. Called by the command
line only; every other process gets a Config that is already resolved. Every problem is a ConfigError of one line that names key and source.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from pydantic import BaseModel, ValidationError

from pd_serve.config import Config
from pd_serve.errors import ConfigError

ENV_PREFIX = "PD_SERVE_"
FlagValue = str | int | float | bool | tuple[str, ...]
SECRET_KEYS = frozenset({"security.api_keys", "security.tenants", "security.cluster_secret"})


class RoleTable(Enum):
    """Tables of a settings file that apply to workers of one role only."""

    PREFILL = "prefill"
    DECODE = "decode"
    COLOCATED = "colocated"


_ROLE_NAMES = frozenset(table.value for table in RoleTable)


@dataclass(frozen=True, slots=True)
class Flag:
    """A command-line option that was given and the setting it stands for."""

    option: str
    key: str
    value: FlagValue


@dataclass(frozen=True, slots=True)
class Sources:
    """Everything a command was given, before any role is known."""

    file: Path | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    """The whole environment: names without the prefix are passed over."""
    flags: tuple[Flag, ...] = ()
    sets: tuple[str, ...] = ()
    """`KEY=VALUE` and `ROLE.KEY=VALUE`, in the order given."""


_SHORT_NAMES = {"tp": "engine.tp"}
"""For --set: what people call a setting by."""


def load_config(sources: Sources, role: RoleTable | None = None) -> Config:
    """The settings of a process of that role; None (the router, the launcher) takes no role's table.

    Raises ConfigError, also for a mistake in a table of another role: a file is right or wrong as a whole.
    """
    merged = _Merged()
    if sources.file is not None:
        _take_file(merged, sources.file, role)
    for name, text in sources.env.items():
        if name.startswith(ENV_PREFIX):
            merged.put(_key_of_env(name), text, name)
    for flag in sources.flags:
        merged.put(flag.key, flag.value, flag.option)
    for wants_role in (False, True):
        for item in sources.sets:
            table, key, text = _split_set(item)
            if (table is not None) == wants_role and table in (None, role):
                merged.put(key, text, f"--set {item.partition('=')[0]}")
    return merged.validated()


def known_keys() -> tuple[str, ...]:
    """Every dotted key, in the order of config.py."""
    return tuple(f"{section}.{key}" for section, model in _sections().items() for key in model.model_fields)


def env_name(key: str) -> str:
    return ENV_PREFIX + key.replace(".", "_").upper()


def settings_toml(config: Config) -> str:
    """The resolved settings as a file that gives them back, secrets included: what the launcher hands to its children."""
    lines: list[str] = []
    for section in _sections():
        lines += [f"[{section}]", *(f"{key} = {_toml(value)}" for key, value in getattr(config, section)), ""]
    return "\n".join(lines)


def settings_lines(config: Config) -> tuple[str, ...]:
    """The resolved settings for the log, one section a line, secrets masked."""
    lines: list[str] = []
    for section in _sections():
        shown = ((key, "***" if value and f"{section}.{key}" in SECRET_KEYS else value) for key, value in getattr(config, section))
        lines.append(f"[{section}] " + " ".join(f"{key}={_toml(value)}" for key, value in shown))
    return tuple(lines)


# ---- helpers


@dataclass(frozen=True, slots=True)
class _Setting:
    value: object
    origin: str


class _Merged:
    """Settings by dotted key, each with where it came from."""

    def __init__(self) -> None:
        self._settings: dict[str, _Setting] = {}

    def put(self, key: str, value: object, origin: str) -> None:
        """A later call wins. Raises ConfigError for an unknown key."""
        _check_key(key, origin)
        self._settings[key] = _Setting(_shaped(key, value, origin), origin)

    def validated(self) -> Config:
        tree: dict[str, dict[str, object]] = {}
        for key, setting in self._settings.items():
            section, _, name = key.partition(".")
            tree.setdefault(section, {})[name] = setting.value
        try:
            return Config.model_validate(tree)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            key = ".".join(str(part) for part in first["loc"][:2])
            setting = self._settings[key]
            shown = "***" if key in SECRET_KEYS else repr(setting.value)
            raise ConfigError(f"{setting.origin}: {key} = {shown}: {_lower_first(first['msg'])}") from None


def _take_file(merged: _Merged, path: Path, role: RoleTable | None) -> None:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a text file in UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    role_tables: list[tuple[str, object, str]] = []
    for name, table in content.items():
        if name not in _ROLE_NAMES:
            _put_table(merged, name, table, str(path))
            continue
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: [{name}] must hold tables, such as [{name}.kv]")
        other = _Merged()
        for section, inner in table.items():
            _put_table(other, section, inner, f"{path} [{name}]")
            if role is not None and name == role.value:
                role_tables.append((section, inner, f"{path} [{name}]"))
        other.validated()
    for section, inner, origin in role_tables:
        _put_table(merged, section, inner, origin)


def _put_table(merged: _Merged, section: str, table: object, origin: str) -> None:
    if section not in _sections():
        raise ConfigError(f"{origin}: unknown section [{section}]{_did_you_mean(section, [*_sections(), *_ROLE_NAMES])}")
    if not isinstance(table, dict):
        raise ConfigError(f"{origin}: {section} must be a table, such as [{section}]")
    for key, value in table.items():
        merged.put(f"{section}.{key}", value, origin)


def _key_of_env(name: str) -> str:
    section, _, key = name.removeprefix(ENV_PREFIX).lower().partition("_")
    return f"{section}.{key}"


def _split_set(item: str) -> tuple[RoleTable | None, str, str]:
    """Role or None, key, text of the value. Raises ConfigError, also for a bad key of another role."""
    key, equals, text = item.partition("=")
    key = key.strip()
    if not equals:
        raise ConfigError(f"--set {item}: expected KEY=VALUE, such as kv.block_size=32")
    table: RoleTable | None = None
    head, _, rest = key.partition(".")
    if head in _ROLE_NAMES:
        table, key = RoleTable(head), rest
    key = _SHORT_NAMES.get(key, key)
    _check_key(key, f"--set {item.partition('=')[0]}")
    return table, key, text.strip()


def _sections() -> dict[str, type[BaseModel]]:
    sections: dict[str, type[BaseModel]] = {}
    for name, info in Config.model_fields.items():
        assert isinstance(info.annotation, type), name
        assert issubclass(info.annotation, BaseModel), name
        sections[name] = info.annotation
    return sections


def _check_key(key: str, origin: str) -> None:
    if key not in known_keys():
        near = _env_names() if origin.startswith(ENV_PREFIX) else known_keys()
        wanted = origin if origin.startswith(ENV_PREFIX) else key
        raise ConfigError(f"{origin}: unknown setting {key or '(empty)'}{_did_you_mean(wanted, near)}")


def _env_names() -> tuple[str, ...]:
    return tuple(env_name(key) for key in known_keys())


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    known = tuple(known)
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    if not near and "." in word:
        near = [candidate for candidate in known if candidate.rpartition(".")[2] == word.rpartition(".")[2]][:1]
    if not near and "." not in word:
        near = [candidate for candidate in known if candidate.rpartition(".")[2] == word][:1]
    return f"; did you mean {near[0]}?" if near else ""


def _shaped(key: str, value: object, origin: str) -> object:
    """Text from the command line or the environment becomes a tuple where the field is one; pydantic converts the rest."""
    section, _, name = key.partition(".")
    if isinstance(value, str) and isinstance(_sections()[section].model_fields[name].default, tuple):
        text = value.strip()
        if not text.startswith("["):
            return tuple(part.strip() for part in text.split(",") if part.strip())
        try:
            return tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{origin}: {key} is not a list: {error}") from error
    return value


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, BaseModel):
        return "{" + ", ".join(f"{key} = {_toml(item)}" for key, item in value) + "}"
    if isinstance(value, str):
        escaped = "".join(f"\\u{ord(char):04x}" if ord(char) < 0x20 or ord(char) == 0x7F or char in '"\\' else char for char in value)
        return f'"{escaped}"'
    assert isinstance(value, (int, float)), value
    return repr(value)


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]
