from __future__ import annotations

import asyncio

from router.once_a_turn import OnceATurn


async def test_many_calls_of_one_turn_are_one_and_later_ones_another() -> None:
    calls: list[str] = []
    ask = OnceATurn(lambda: calls.append("asked"))
    for _ in range(1000):
        ask()
    assert not calls, "what asks may be in the middle of something"
    await asyncio.sleep(0)
    assert calls == ["asked"]
    ask()
    await asyncio.sleep(0)
    assert calls == ["asked"] * 2


async def test_what_is_done_may_ask_again() -> None:
    left = 3

    def again() -> None:
        nonlocal left
        left -= 1
        if left:
            ask()

    ask = OnceATurn(again)
    ask()
    for _ in range(3):
        await asyncio.sleep(0)
    assert not left
