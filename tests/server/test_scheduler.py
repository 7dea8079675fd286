"""The scheduler as arithmetic."""

from dataclasses import replace

from mocha_server.scheduler import AHEAD_S, Candidate, Scheduler, Work

NOW = 99.0
SCHEDULER = Scheduler(block=100, largest=800, max_rows=3, head_start=30)
MANY = Scheduler(block=100, largest=800, max_rows=8)


def choose(candidates: list[Candidate], scheduler: Scheduler = SCHEDULER) -> list[Work]:
    return scheduler.choose(filter(scheduler.is_ready, candidates), NOW)


def live(key: int, buffered: int, due: float = 0.0, ending: bool = False, fresh: bool = False) -> Candidate:
    return Candidate(key, True, buffered, due, ending, fresh)


def test_streams_wait_for_a_block_and_take_whole_blocks_at_most_largest():
    assert choose([live(1, 99)]) == []
    assert choose([live(1, 250)]) == [Work(1, 200, False)]
    assert choose([live(1, 850)]) == [Work(1, 800, False)]


def test_oldest_first_and_no_more_than_max_rows():
    chosen = choose([live(k, 100, due=9 - k) for k in range(5)])
    assert [w.key for w in chosen] == [4, 3, 2]


def test_large_takes_have_fewer_rows():
    waiting = [live(k, 800, due=float(k)) for k in range(3)]
    assert [w.key for w in choose(waiting, MANY)] == [0, 1]
    assert [w.key for w in choose(waiting)] == [0]


def test_steps_have_few_shapes_and_every_batch_fits_one():
    scheduler = Scheduler(block=100, largest=800, max_rows=256)
    assert scheduler.takes() == [100, 200, 400, 800]
    assert [scheduler.sizes(take)[-1] for take in (*scheduler.takes(), 0)] == [256, 256, 128, 64, 64]
    for count in range(1, 300):
        for buffered, ending in ((100, False), (850, False), (10, True)):
            works = choose([live(k, buffered, due=float(k), ending=ending) for k in range(count)], scheduler)
            take = 0 if ending else works[0].num_samples
            assert scheduler.padded(works) in scheduler.sizes(take)
            assert len(works) <= scheduler.padded(works) <= max(len(works) + 3, 1.25 * len(works))


def test_many_rows_are_not_padded_but_the_newest_wait():
    works = choose([live(k, 100, due=float(k)) for k in range(79)], Scheduler(block=100, largest=800, max_rows=256))
    assert [w.key for w in works] == list(range(64))


def test_all_rows_of_a_batch_take_the_same_so_that_the_batch_hears_most():
    waiting = [live(1, 250, due=1.0), live(2, 150, due=2.0), live(3, 700, due=3.0)]
    assert choose(waiting) == [Work(1, 200, False), Work(3, 200, False)]
    assert choose(waiting[1:]) == [Work(2, 100, False), Work(3, 100, False)]
    many = [live(1, 300, due=1.0), *(live(k, 100, due=2.0) for k in range(2, 9))]
    assert {w.num_samples for w in choose(many, MANY)} == {100}


def test_fresh_streams_have_batches_of_their_own_and_need_a_little_less():
    fresh = live(1, 70, due=1.0, fresh=True)
    assert choose([live(1, 69, fresh=True)]) == []
    assert choose([fresh, live(2, 500, due=2.0)]) == [Work(1, 70, False, fresh=True)]
    assert choose([fresh, live(2, 500, due=0.0)]) == [Work(2, 400, False)]


def test_an_ending_stream_takes_whole_blocks_then_the_rest_and_flushes():
    assert choose([live(1, 30, ending=True)]) == [Work(1, 30, True)]
    assert choose([live(1, 0, ending=True)]) == [Work(1, 0, True)]
    assert choose([live(1, 930, ending=True)]) == [Work(1, 800, False)]
    both = [live(1, 30, ending=True), live(2, 5, ending=True, fresh=True), live(3, 100)]
    assert choose(both) == [Work(1, 30, True), Work(2, 5, True, fresh=True)]


def test_files_yield_to_live_streams():
    files = [Candidate(k, False, 200) for k in (6, 7, 8)]
    assert [w.key for w in choose(files, MANY)] == [6, 7, 8]
    chosen = choose([*files, live(1, 100, due=5.0)], MANY)
    assert chosen == [Work(1, 100, False), Work(6, 100, False), Work(7, 100, False)]


def test_files_that_do_not_fit_a_step_take_no_place_in_it():
    others = [Candidate(7, False, 30, ending=True), Candidate(8, False, 200, fresh=True), Candidate(9, False, 200)]
    assert [w.key for w in choose([*others, live(1, 200)])] == [1, 9]
    assert [w.key for w in choose([*others, live(1, 30, ending=True)])] == [1, 7]


def test_a_live_stream_far_ahead_of_real_time_waits_as_a_file_does():
    ahead, file = live(1, 200, due=NOW + AHEAD_S + 0.1), Candidate(2, False, 200, due=NOW - 1, fresh=True)
    assert [w.key for w in choose([ahead, file])] == [2]
    assert [w.key for w in choose([replace(ahead, due=NOW + AHEAD_S), file])] == [1]
    several = [replace(ahead, key=k) for k in (1, 2, 3)]
    assert [w.key for w in choose([*several, live(4, 200)], MANY)] == [4, 1, 2]
