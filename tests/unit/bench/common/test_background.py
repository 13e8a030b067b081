"""The share of CPU time that other processes used."""

import os
import threading

import pytest

from bench.common import background


def process(pid, session, ticks, name="a name"):
    """Returns a line of /proc/<pid>/stat."""
    before = f"{pid} ({name}) S 1 {pid} {session} 0 -1 0 0 0 0 0"
    return before + " " + " ".join(map(str, ticks)) + " 20 0 1 0"


def write_proc(proc, cpu, processes):
    proc.mkdir(exist_ok=True)
    (proc / "stat").write_text(f"cpu  {' '.join(map(str, cpu))}\ncpu0 1 2 3\n")
    for pid, session, ticks in processes:
        (proc / str(pid)).mkdir(exist_ok=True)
        (proc / str(pid) / "stat").write_text(process(pid, session, ticks))


def test_share_of_others_is_busy_time_minus_our_own(tmp_path):
    write_proc(tmp_path, (100, 0, 100, 700, 100, 0, 0, 0, 5, 0), [(7, 7, (1, 1, 0, 0))])
    before = background.read({7}, tmp_path)
    write_proc(
        tmp_path,
        (160, 0, 110, 715, 105, 0, 0, 10, 9, 0),  # 100 ticks: 80 are busy, of which 10 are stolen
        [(7, 7, (31, 1, 5, 5)), (8, 7, (10, 0, 0, 0)), (9, 9, (20, 0, 0, 0))],
    )
    after = background.read({7}, tmp_path)
    assert background.share_of_others(before, after) == pytest.approx(0.3)
    assert background.share_of_others(before, before) is None


def test_process_name_may_contain_spaces_and_brackets():
    odd = process(3, 7, (1, 2, 3, 4), name="a) S 1 (b")
    assert background.session_ticks([odd], frozenset({7})) == 10
    assert background.session_ticks([odd], frozenset({8})) == 0


def test_seconds_of_a_session_are_those_of_all_its_threads(tmp_path):
    write_proc(tmp_path, (0,) * 10, [(7, 7, (9, 9, 9, 9)), (8, 7, (0, 0, 0, 0)), (9, 9, (0,) * 4)])
    for pid, thread, nanoseconds in ((7, 7, 10**9), (7, 70, 5), (8, 8, 10**6), (9, 9, 10**12)):
        task = tmp_path / str(pid) / "task" / str(thread)
        task.mkdir(parents=True)
        (task / "schedstat").write_text(f"{nanoseconds} 1 2\n")
    assert background.session_seconds(7, tmp_path) == 1.001000005
    with pytest.raises(ProcessLookupError):
        background.session_seconds(1, tmp_path)


def test_a_watch_has_a_share_for_each_repetition():
    watch = background.BusyWatch(lambda: [os.getsid(0)])
    for idle_s in (0.0, 0.05):
        with watch.repetition(idle_s=idle_s):
            threading.Event().wait(0.05)
    assert len(watch.shares) == 2
    assert all(0 <= share <= 1 for share in watch.shares)
    [result] = background.busy_results(watch.shares)
    assert result.runs == tuple(100 * share for share in watch.shares)
