from __future__ import annotations

import select
import threading

from tests.patience import PATIENCE_S
from workers.inbox import Inbox


def test_put_wakes_and_take_all_takes_everything_in_order() -> None:
    inbox: Inbox[int] = Inbox()
    assert inbox.take_all() == []
    assert select.select([inbox], [], [], 0)[0] == []
    inbox.put(1)
    inbox.put(2)
    assert select.select([inbox], [], [], 0)[0] == [inbox]
    assert inbox.take_all() == [1, 2]
    assert select.select([inbox], [], [], 0)[0] == []
    inbox.close()
    inbox.close()


def test_no_item_of_any_thread_is_lost_or_left_without_a_wake_up() -> None:
    inbox: Inbox[tuple[int, int]] = Inbox()
    threads = [threading.Thread(target=lambda n=n: [inbox.put((n, i)) for i in range(500)]) for n in range(3)]
    for thread in threads:
        thread.start()
    taken: list[tuple[int, int]] = []
    while len(taken) < 1500:
        assert select.select([inbox], [], [], PATIENCE_S)[0], "items were left without a wake-up"
        taken += inbox.take_all()
    for thread in threads:
        thread.join()
    for n in range(3):
        assert [i for who, i in taken if who == n] == list(range(500))
    inbox.close()


def test_put_after_close_is_dropped() -> None:
    inbox: Inbox[int] = Inbox()
    inbox.close()
    inbox.put(1)
