"""The scheduler as arithmetic."""

from mocha_server.scheduler import Candidate, Scheduler, Work

SCHEDULER = Scheduler(block=100, largest=800, max_rows=3, max_files_beside_live=1)


def live(key: int, buffered: int, since: float = 0.0, ending: bool = False) -> Candidate:
    return Candidate(key, buffered, since, True, ending)


def test_streams_wait_for_a_block_and_take_whole_blocks_at_most_largest():
    assert SCHEDULER.choose([live(1, 99)]) == []
    assert SCHEDULER.choose([live(1, 250)]) == [Work(1, 250, False)]
    assert SCHEDULER.choose([live(1, 850)]) == [Work(1, 800, False)]


def test_oldest_first_and_no_more_than_max_rows():
    chosen = SCHEDULER.choose([live(k, 100, since=9 - k) for k in range(5)])
    assert [w.key for w in chosen] == [4, 3, 2]


def test_an_ending_stream_takes_the_rest_and_flushes_once_it_is_empty():
    assert SCHEDULER.choose([live(1, 30, ending=True)]) == [Work(1, 30, True)]
    assert SCHEDULER.choose([live(1, 0, ending=True)]) == [Work(1, 0, True)]
    assert SCHEDULER.choose([live(1, 900, ending=True)]) == [Work(1, 800, False)]


def test_files_yield_to_live_streams():
    files = [Candidate(k, 800, 0.0, False, False) for k in (7, 8)]
    assert [w.key for w in SCHEDULER.choose(files)] == [7, 8]
    assert [w.key for w in SCHEDULER.choose([*files, live(1, 100, since=5.0)])] == [1, 7]
