"""`saver.hand_over`: memory that goes from a pause of one process to a resume of another."""

import itertools
import time

import pytest

pytest.importorskip("torch")

from companions import pair

pytestmark = pytest.mark.sim_only

MIB = 2**20
numbers = itertools.count()
MAKE = """
import gc
def make(tag, mib, value, **options):
    with saver.region(tag, **options):
        tensors[tag] = [torch.full((each * 2**20,), value, dtype=torch.uint8) for each in mib]
    saver.pause(tag)
def look(tag):
    return sorted({int(end) for each in tensors[tag] for end in (each.min(), each.max())})
tensors = {}
"""
CLEAN = (
    "tensors.clear(); gc.collect(); saver.pause(); saver.resume(); saver.trim(); answer = saver.stats()['device_bytes']"
)
FREE = "from ebbtide import _core; answer = _core.query_device(0).free_bytes // 2**20"


@pytest.fixture(scope="module")
def made():
    with pair("handing", 64) as found:
        yield found


@pytest.fixture
def two(made):
    """Those that give and take. One that a test has killed is made anew."""
    for one in made:
        one.revive()
        assert one.run(MAKE) is None
    yield made
    for one in made:
        if one.poll() is None:
            assert one.run_until(CLEAN, 0) == 0


def prepare(two, giving=(20, 12, 10), taking=(20, 12, 10), **options):
    """The tag "out" of the first is here, "in" of the second is away."""
    giver, taker = two
    options = {"exportable": True, **options}
    names = f"IN, OUT = 'in{next(numbers)}', 'out{next(numbers)}'"  # a tag gets trimmed segments back
    assert [one.run(names) for one in two] == [None, None]
    assert taker.run(f"make(IN, {taking}, 5, **{options})") is None
    assert giver.run(f"make(OUT, {giving}, 3, **{options}); saver.resume(OUT)") is None


def hand_over(two, timeout=20, pause="OUT"):
    """Both answers."""
    giver, taker = two
    taker.start(f"answer = saver.resume(IN, timeout={timeout}).bytes")
    given = giver.run(f"answer = saver.hand_over(pause={pause}, to={taker.pid}).bytes")
    return given, taker.answer()


def test_both_sides_are_whole_and_the_device_never_holds_both(two):
    giver, taker = two
    prepare(two)
    assert hand_over(two) == (42 * MIB, 42 * MIB)
    assert taker.run("answer = look(IN)") == [5]
    assert giver.run("answer = saver.stats()['device_bytes']") == 0
    assert giver.run(FREE) == 64 - 42
    for _ in range(3):  # back, and again: also with memory that came from the other
        giver.start("answer = saver.resume(OUT, timeout=20).bytes")
        assert taker.run(f"answer = saver.hand_over(pause=IN, to={giver.pid}).bytes") == 42 * MIB
        assert giver.answer() == 42 * MIB
        assert giver.run("answer = look(OUT)") == [3]
        assert hand_over(two) == (42 * MIB, 42 * MIB)
        assert taker.run("answer = look(IN)") == [5]


@pytest.mark.parametrize(
    ("giving", "taking"),
    [((20, 20), (10, 10, 10)), ((12, 14), (20, 20)), ((20, 20), (30,)), ((40,), (12, 14, 10)), ((24,), (42,))],
)
def test_sides_of_other_sizes(two, giving, taking):
    giver, taker = two
    prepare(two, giving, taking)
    assert hand_over(two) == (sum(giving) * MIB, sum(taking) * MIB)
    assert taker.run("answer = look(IN)") == [5]
    assert taker.run("saver.pause(IN)") is None
    assert giver.run("saver.resume(OUT); answer = look(OUT)") == [3]


@pytest.mark.parametrize("options", [{"backup": None}, {"backup": "pinned"}, {"backup": "disk"}, {"exportable": False}])
def test_every_policy(two, options):
    taker = two[1]
    prepare(two, **options)
    if options.get("exportable") is False:  # nothing of the taker's can be asked for
        taker.run("with saver.region('other', exportable=True): pass")
    assert hand_over(two) == (42 * MIB, 42 * MIB)
    is_dropped = "backup" in options and options["backup"] is None
    assert taker.run("answer = look(IN)") == ([0] if is_dropped else [5])


def test_dropped_memory_is_cleared_unless_both_sides_say_otherwise(two):
    giver, taker = two
    try:
        for clearing, seen in (((False, True), [0]), ((True, False), [0]), ((False, False), [3])):
            for one, clears in zip(two, clearing, strict=True):
                assert one.run(f"saver.configure(clear_handed={clears})") is None
            prepare(two, (40,), (40,), backup=None)
            assert giver.run("[each.fill_(3) for each in tensors[OUT]] and None") is None
            assert hand_over(two) == (40 * MIB, 40 * MIB)
            assert taker.run("answer = look(IN)") == seen
            assert taker.run(CLEAN) == giver.run(CLEAN) == 0
    finally:
        for one in two:
            one.run("saver.configure(clear_handed=True)")


def test_the_backup_and_hooks_are_those_of_a_pause(two):
    giver, taker = two
    prepare(two)
    giver.run("""
        log = []
        removers = [saver.on(event, OUT, lambda tag, event=event: log.append(event))
                    for event in ("before_pause", "after_pause", "before_resume", "after_resume")]
    """)
    assert hand_over(two, pause="{OUT: None}") == (42 * MIB, 42 * MIB)
    assert giver.run("answer = [log, [each() for each in removers] and 0]") == [["before_pause", "after_pause"], 0]
    taker.run("saver.pause(IN)")
    assert giver.run("saver.resume(OUT); answer = look(OUT)") == [0]


def test_a_resume_that_waits_is_woken(two):
    giver, taker = two
    prepare(two)
    taker.start("answer = saver.resume(IN, timeout=30).bytes")
    time.sleep(0.5)
    assert not taker.has_answered()
    assert giver.run(f"answer = saver.hand_over(pause=OUT, to={taker.pid}).bytes") == 42 * MIB
    assert taker.answer() == 42 * MIB


def test_one_that_comes_later_takes_the_offer(two):
    giver, taker = two
    prepare(two)
    giver.start(f"answer = saver.hand_over(pause=OUT, to={taker.pid}).bytes")
    time.sleep(0.5)
    assert not giver.has_answered()
    assert taker.run("answer = saver.resume(IN).bytes") == 42 * MIB
    assert giver.answer() == 42 * MIB


def test_one_that_had_room_before_needs_nothing(two):
    giver, taker = two
    prepare(two, (20,), (10,))
    assert taker.run("answer = saver.resume(IN).bytes") == 10 * MIB
    taker.run("saver.resume()")
    assert giver.run(f"answer = saver.hand_over(pause=OUT, to={taker.pid}).bytes") == 20 * MIB
    giver.run("saver.resume(OUT)")
    taker.run("saver.pause(IN)")
    giver.start(f"answer = saver.hand_over(pause=OUT, to={taker.pid}).bytes")
    taker.run("saver.resume(IN)")
    assert giver.answer() == 20 * MIB
    assert taker.run("answer = look(IN)") == [5]


def test_one_that_comes_back_in_another_way_needs_nothing(two):
    giver, taker = two
    prepare(two, (10,), (10,))
    giver.start(f"answer = saver.hand_over(pause=OUT, to={taker.pid}).bytes")
    time.sleep(0.2)
    taker.run("saver.resume(IN, wait=False).wait()")
    assert giver.answer() == 10 * MIB
    assert taker.run("answer = look(IN)") == [5]


def test_an_offer_outlives_a_first_shortage(two):
    """Caches go before a resume gives up."""
    giver, taker = two
    taker.run("c = torch.ones(1000, device=saver.device)")
    prepare(two, (20,), (30,))
    taker.run("with saver.region('cached'): c = torch.ones(40 << 20, dtype=torch.uint8, device=saver.device)")
    taker.run("c = None; gc.collect()")
    giver.start(f"answer = saver.hand_over(pause=OUT, to={taker.pid}).bytes")
    time.sleep(0.2)
    assert taker.run("answer = saver.resume(IN, timeout=4).bytes") == 30 * MIB
    assert giver.answer() == 20 * MIB


def test_a_giver_without_descriptors_costs_a_try(two):
    giver, taker = two
    prepare(two)
    giver.run("""
        import os, resource
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        from ebbtide.processes import handing
        offer = handing.Giving.offer
        def offer_and_fill(self, seconds):
            offer(self, seconds)
            resource.setrlimit(resource.RLIMIT_NOFILE, (60, limits[1]))
            try:
                while True:
                    files.append(os.dup(0))
            except OSError:
                pass
        files = []
        handing.Giving.offer = offer_and_fill
    """)
    given, taken = hand_over(two, timeout=8)
    giver.run("resource.setrlimit(resource.RLIMIT_NOFILE, limits); [os.close(each) for each in files]")
    giver.run("handing.Giving.offer = offer")
    assert given == 42 * MIB and 0 < taken <= 42 * MIB
    assert taker.run("answer = look(IN)") == [5]


def test_nobody_takes_it(two):
    giver, taker = two
    prepare(two)
    refused = giver.run(f"saver.hand_over(pause=OUT, to={taker.pid}, timeout=0.2)")
    assert refused["error"] == "StateError" and "has not taken the memory with a resume" in refused["text"]
    assert giver.run("answer = look(OUT)") == [3]
    giver.run("saver.pause(OUT)")
    assert taker.run("answer = saver.resume(IN).bytes") == 42 * MIB, "the offer is gone"


def test_a_resume_that_fails_declines(two):
    giver, taker = two
    prepare(two)
    taker.run("saver.configure(device_limit=1)")
    given, taken = hand_over(two, timeout=0.3)
    taker.run("saver.configure(device_limit=None)")
    assert taken["error"] == "OutOfMemoryError"
    assert given["error"] == "StateError" and "its resume failed" in given["text"]
    assert giver.run("answer = look(OUT)") == [3]


def test_a_pause_that_is_refused_leaves_the_resume_waiting(two):
    giver, taker = two
    prepare(two)
    giver.run("region = saver.region(OUT, exportable=True); region.__enter__()")
    given, taken = hand_over(two, timeout=0.5)
    giver.run("region.__exit__(None, None, None)")
    assert given["error"] == "StateError" and "inside its region" in given["text"]
    assert taken["error"] == "OutOfMemoryError"
    given, taken = hand_over(two)
    assert given == 42 * MIB and 0 < taken <= 42 * MIB  # the margin has brought some of it before
    assert taker.run("answer = look(IN)") == [5]


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        ("pause=OUT, to=1", "StateError", "no process 1 shares here; others: python"),
        ("pause=OUT, to='x'", "TypeError", "takes the PID"),
        ("pause=OUT, to=True", "TypeError", "takes the PID"),
        ("pause=OUT, to={pid}, timeout=-1", "ValueError", "timeout"),
        ("pause='nobody', to={pid}, timeout=0.1", "StateError", ""),
        ("pause=[], to={pid}", "ValueError", "names no tag"),
        ("pause=OUT, to={pid}, backup='tape'", "ValueError", "backup must be"),
    ],
)
def test_malformed_calls(two, call, error, words):
    giver, taker = two
    prepare(two)
    refused = giver.run(f"saver.hand_over({call.format(pid=taker.pid)})")
    assert refused["error"] == error and words in refused["text"]
    assert giver.run("answer = look(OUT)") == [3]


# --- the end of one of them ---


def stop_midway(two, victim):
    """The copies take their time, and one of the two is killed then."""
    giver, taker = two
    prepare(two)
    giver.run("from ebbtide.processes import handing; give = handing.Giving.give")
    giver.run("""
        import time
        def slowly(self, *arguments):
            time.sleep(0.3)
            return give(self, *arguments)
        handing.Giving.give = slowly
    """)
    taker.start("answer = saver.resume(IN, timeout=3).bytes")
    giver.start(f"answer = saver.hand_over(pause=OUT, to={taker.pid}).bytes")
    time.sleep(0.45)
    two[victim].kill()


def test_a_giver_that_is_killed_midway_costs_the_taker_nothing(two):
    stop_midway(two, 0)
    taker = two[1]
    taken = taker.answer()
    assert isinstance(taken, int) or taken["error"] == "OutOfMemoryError", taken
    taker.run("saver.resume(IN, timeout=10)")
    assert taker.run("answer = look(IN)") == [5]
    assert taker.run(FREE) == 64 - 42


def test_a_taker_that_is_killed_midway_costs_the_giver_nothing(two):
    stop_midway(two, 1)
    giver = two[0]
    assert giver.answer() == 42 * MIB
    giver.run("handing.Giving.give = give")
    assert giver.run_until(FREE, 64) == 64
    assert giver.run("saver.resume(OUT); answer = look(OUT)") == [3]


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("delay", [0.0, 0.005, 0.01, 0.02, 0.04])
def test_one_that_is_killed_at_any_moment(two, victim, delay):
    giver, taker = two
    prepare(two)
    taker.start("answer = saver.resume(IN, timeout=2).bytes")
    giver.start(f"answer = saver.hand_over(pause=OUT, to={taker.pid}, timeout=5).bytes")
    time.sleep(delay)
    two[victim].kill()
    other, tag, value = (giver, "OUT", 3) if victim else (taker, "IN", 5)
    other.answer()
    assert other.run(f"saver.pause({tag}); saver.resume({tag}, timeout=10); answer = look({tag})") == [value]
    assert other.run(FREE) == 64 - 42


def test_a_stopped_taker_is_given_up(two):
    giver, taker = two
    prepare(two)
    taker.stop()
    refused = giver.run(f"saver.hand_over(pause=OUT, to={taker.pid}, timeout=0.3)")
    taker.go_on()
    assert refused["error"] == "StateError"
    assert giver.run("answer = look(OUT)") == [3]
