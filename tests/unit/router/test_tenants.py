"""Who asks: keys, classes and limits as configured, and no key ever shown."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pd_serve.config import Config, OverloadConfig, SecurityConfig, TenantConfig
from pd_serve.errors import AuthenticationError, ConfigError, InvalidRequestError
from router.occupancy import OwnOccupancy
from router.overload import check_overload
from router.tenants import RateLimitError, Tenants, tenant_names

GOLD = TenantConfig(name="gold", key="sk-gold", weight=4.0)
TIN = TenantConfig(name="tin", key="sk-tin", requests_per_minute=2, tokens_per_minute=100, priority="normal")


def tenants(*entries: TenantConfig, api_keys: tuple[str, ...] = (), now: Callable[[], float] = lambda: 50.0, **overload: object) -> Tenants:
    config = Config(security=SecurityConfig(tenants=entries, api_keys=api_keys), overload=OverloadConfig.model_validate(overload))
    return Tenants(config, OwnOccupancy(), now)


def test_keys_name_their_tenant_and_others_are_refused() -> None:
    made = tenants(GOLD, TIN, api_keys=("sk-plain",))
    gold = made.ticket("Bearer sk-gold").tenant
    assert (gold.name, gold.weight) == ("gold", 4.0)
    plain = made.ticket("bearer  sk-plain ").tenant
    assert plain.name.startswith("key-")
    assert "plain" not in plain.name
    for authorization in (None, "", "Bearer", "Bearer sk-gol", "Basic sk-gold", "sk-gold", "Bearer \udcff"):
        with pytest.raises(AuthenticationError):
            made.ticket(authorization)


def test_without_keys_there_is_one_tenant() -> None:
    made = tenants()
    assert made.ticket(None).tenant is made.ticket("Bearer whatever").tenant


def test_classes_are_named_in_a_header_and_bounded_by_the_tenant_s_ceiling() -> None:
    made = tenants(GOLD, TIN)
    assert [made.ticket("Bearer sk-gold", name).rank for name in ("high", "Normal ", "low", None)] == [0, 1, 2, 1]
    assert [made.ticket("Bearer sk-tin", name).rank for name in ("high", "low")] == [1, 2]
    with pytest.raises(InvalidRequestError, match="high, normal, low") as raised:
        made.ticket("Bearer sk-gold", "highest")
    assert raised.value.param == "x-priority"


def test_requests_and_tokens_are_limited_and_both_are_told() -> None:
    made = tenants(TIN)
    ticket = made.ticket("Bearer sk-tin")
    made.charge(ticket, 60)
    lines = made.header_lines(ticket).decode()
    assert "x-ratelimit-limit-requests: 2\r\nx-ratelimit-remaining-requests: 1\r\nx-ratelimit-reset-requests: 30s\r\n" in lines
    assert "x-ratelimit-limit-tokens: 100\r\nx-ratelimit-remaining-tokens: 40\r\nx-ratelimit-reset-tokens: 36s\r\n" in lines
    with pytest.raises(RateLimitError) as raised:
        made.charge(ticket, 50)
    assert raised.value.retry_after_s == pytest.approx(6.0)
    made.spent(ticket, 40)
    for _ in range(2):  # what was refused for its tokens has not counted as a request
        made.ticket("Bearer sk-tin")
    with pytest.raises(RateLimitError) as raised:
        made.ticket("Bearer sk-tin")
    assert raised.value.retry_after_s == pytest.approx(30.0)
    assert ("x-ratelimit-remaining-requests", "0") in raised.value.headers
    assert "sk-tin" not in raised.value.message
    with pytest.raises(RateLimitError, match="too large") as raised:
        made.charge(ticket, 101)
    assert raised.value.retry_after_s == float("inf")


def test_keys_without_limits_of_their_own_have_the_usual_ones() -> None:
    made = tenants(GOLD, requests_per_minute=1)
    made.ticket("Bearer sk-gold")
    with pytest.raises(RateLimitError):
        made.ticket("Bearer sk-gold")


def test_several_keys_of_one_name_are_one_tenant() -> None:
    other = TIN.model_copy(update={"key": "sk-other"})
    made = tenants(TIN, other)
    assert made.ticket("Bearer sk-tin").tenant is made.ticket("Bearer sk-other").tenant
    assert tenant_names(Config(security=SecurityConfig(tenants=(TIN, other)))) == ("tin",)


@pytest.mark.parametrize(
    ("overload", "words"),
    [
        ({"default_class": "usual"}, "default_class"),
        ({"classes": ("high", "high", "normal")}, "twice"),
        ({"max_queued": (1, 2)}, "max_queued"),
        ({"classes": ("a", "b"), "default_class": "a"}, "priority 'normal'"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(overload: dict[str, object], words: str) -> None:
    config = Config(security=SecurityConfig(tenants=(TIN,)), overload=OverloadConfig.model_validate(overload))
    with pytest.raises(ConfigError, match=words):
        check_overload(config)
