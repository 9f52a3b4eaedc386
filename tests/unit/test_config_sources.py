"""Precedence of settings, per-role tables, and the one line that a mistake gets."""

from __future__ import annotations

from pathlib import Path

import pytest

from pd_serve.config import Config
from pd_serve.config_sources import Flag, RoleTable, Sources, env_name, known_keys, load_config, settings_lines, settings_toml
from pd_serve.errors import ConfigError


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "settings.toml"
    path.write_text(text)
    return path


def error_of(sources: Sources, role: RoleTable | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(sources, role)
    return str(caught.value)


def test_nothing_given_is_the_defaults() -> None:
    assert load_config(Sources()) == Config()


def test_each_source_beats_the_one_before_it(tmp_path: Path) -> None:
    file = write(tmp_path, "[kv]\nblock_size = 1\n[prefill.kv]\nblock_size = 2\n")
    env = {"PD_SERVE_KV_BLOCK_SIZE": "3", "HOME": "/nowhere"}
    flags = (Flag("--block-size", "kv.block_size", 4),)
    role = RoleTable.PREFILL
    assert load_config(Sources(file=file)).kv.block_size == 1
    assert load_config(Sources(file=file), RoleTable.DECODE).kv.block_size == 1
    assert load_config(Sources(file=file), role).kv.block_size == 2
    assert load_config(Sources(file, env), role).kv.block_size == 3
    assert load_config(Sources(file, env, flags), role).kv.block_size == 4
    assert load_config(Sources(file, env, flags, ("kv.block_size=5",)), role).kv.block_size == 5
    both = ("prefill.kv.block_size=6", "kv.block_size=5")
    assert load_config(Sources(file, env, flags, both), role).kv.block_size == 6
    assert load_config(Sources(file, env, flags, both), RoleTable.DECODE).kv.block_size == 5


def test_text_becomes_the_type_of_the_field() -> None:
    sets = (
        "kv.prefix_cache=false",
        "worker.heartbeat_s=0.5",
        "engine.cpu_affinity=0",
        "worker.routers=http://a:1, http://b:2",
        'security.api_keys=["k,1"]',
    )
    config = load_config(Sources(sets=sets))
    assert config.kv.prefix_cache is False
    assert config.worker.heartbeat_s == 0.5
    assert config.engine.cpu_affinity == "0"
    assert config.worker.routers == ("http://a:1", "http://b:2")
    assert config.security.api_keys == ("k,1",)


def test_a_value_may_hold_an_equals_sign() -> None:
    assert load_config(Sources(sets=("security.cluster_secret=a=b=",))).security.cluster_secret == "a=b="


@pytest.mark.parametrize(
    ("sources", "words"),
    [
        (Sources(sets=("kv.block_siz=3",)), ("--set kv.block_siz", "unknown setting", "did you mean kv.block_size?")),
        (Sources(sets=("block_size=3",)), ("did you mean kv.block_size?",)),
        (Sources(sets=("decode.kv.blocksize=3",)), ("--set decode.kv.blocksize", "kv.block_size?")),
        (Sources(sets=("kv.block_size",)), ("expected KEY=VALUE",)),
        (Sources(sets=("kv.block_size=none",)), ("--set kv.block_size", "'none'", "valid integer")),
        (Sources(sets=("kv.block_size=0",)), ("greater than or equal to 1",)),
        (Sources(sets=("model.dtype=fp32",)), ("'bfloat16', 'float16' or 'float32'",)),
        (Sources(sets=("worker.routers=[1",)), ("not a list",)),
        (Sources(env={"PD_SERVE_KV_BLOCK_SISE": "3"}), ("did you mean PD_SERVE_KV_BLOCK_SIZE?",)),
        (Sources(env={"PD_SERVE_KV_BLOCK_SIZE": "x"}), ("PD_SERVE_KV_BLOCK_SIZE: kv.block_size = 'x'",)),
        (Sources(flags=(Flag("--port", "router.port", 70000),)), ("--port: router.port = 70000",)),
        (Sources(file=Path("/nowhere/x.toml")), ("cannot read /nowhere/x.toml",)),
    ],
)
def test_a_mistake_is_one_line_that_names_its_source(sources: Sources, words: tuple[str, ...]) -> None:
    message = error_of(sources)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[kw]\nblock_size = 1\n", ("unknown section [kw]", "did you mean kv?")),
        ("[kv]\nblock_sizes = 1\n", ("did you mean kv.block_size?",)),
        ("kv = 3\n", ("must be a table",)),
        ("decode = 3\n", ("must hold tables",)),
        ("[decode]\nblock_size = 3\n", ("[decode]", "unknown section [block_size]")),
        ("[decode.kv]\nblock_size = 0\n", ("[decode]: kv.block_size = 0",)),
        ("[decode.kv]\nblock_sise = 3\n", ("[decode]", "did you mean kv.block_size?")),
        ("[kv\n", ("not valid TOML",)),
    ],
)
def test_a_mistake_in_the_file_is_found_for_every_role(tmp_path: Path, text: str, words: tuple[str, ...]) -> None:
    file = write(tmp_path, text)
    for role in (None, *RoleTable):
        message = error_of(Sources(file=file), role)
        assert "\n" not in message
        for word in (file.name, *words):
            assert word in message


def test_a_secret_is_not_repeated_in_an_error(tmp_path: Path) -> None:
    file = write(tmp_path, '[security]\ncluster_secret = ["hunter2"]\n')
    assert "hunter2" not in error_of(Sources(file=file))


def test_resolved_settings_are_a_file_that_gives_them_back(tmp_path: Path) -> None:
    sets = ('security.cluster_secret=a"\\b', "security.api_keys=k1,k2", "worker.heartbeat_s=0.25", "model.name=smöl")
    config = load_config(Sources(sets=sets))
    assert load_config(Sources(file=write(tmp_path, settings_toml(config)))) == config


def test_secrets_are_masked_in_the_text_that_is_logged() -> None:
    config = load_config(Sources(sets=("security.cluster_secret=hunter2", "security.api_keys=k1,k2")))
    text = "\n".join(settings_lines(config))
    assert "hunter2" not in text
    assert "k1" not in text
    assert 'cluster_secret="***"' in text


def test_every_key_has_its_own_environment_variable() -> None:
    names = [env_name(key) for key in known_keys()]
    assert len(set(names)) == len(names)
    for key, name in zip(known_keys(), names, strict=True):
        section, _, field = key.partition(".")
        value = getattr(getattr(Config(), section), field)
        text = ",".join(value) if isinstance(value, tuple) else str(value)
        assert load_config(Sources(env={name: text})) == Config()
