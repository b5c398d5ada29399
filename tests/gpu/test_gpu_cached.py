"""Memory that torch caches makes room on a GPU: for a resume, a swap and a region; and the message where it can't."""

import pytest

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.device_memory

SIZES = """
        import gc
        def made(tag, part, backup=None):
            with saver.region(tag, backup=backup):
                return torch.full((int(part * TOTAL) // MIB * MIB,), 7, dtype=torch.uint8, device="cuda")
        torch.zeros(1, device="cuda")
        TOTAL = torch.cuda.mem_get_info()[0]
"""


def test_what_another_tag_caches_makes_room(program):
    program(
        SIZES
        + """
        away, small = made("away", 0.6), made("kept", 0.01, "ram")
        saver.pause("away")
        gone = made("cached", 0.6)
        del gone
        saver.resume("away")
        assert not saver.is_paused("away") and saver.tags()["cached"].size_bytes == 0
        other = made("leaves", 0.01)
        saver.pause("away")
        gone = made("cached", 0.6)
        del gone
        saver.swap(pause="leaves", resume="away")
        assert not saver.is_paused("away") and bool((small == 7).all())
        """
    )


def test_what_shares_a_handle_with_living_memory_makes_room(program):
    program(
        SIZES
        + """
        away = made("away", 0.6)
        saver.pause("away")
        kept, gone = made("cached", 0.01, "ram"), [made("cached", 0.005, "ram") for _ in range(100)]
        saver.pause("cached")
        saver.resume("cached")
        gone.clear()
        saver.resume("away")
        assert bool((kept == 7).all())
        """
    )


def test_what_torch_caches_outside_regions_makes_room(program):
    program(
        SIZES
        + """
        away = made("away", 0.6)
        saver.pause("away")
        plain = torch.empty(int(0.7 * TOTAL), dtype=torch.uint8, device="cuda")
        del plain
        assert free() < 0.4 * TOTAL
        saver.resume("away")
        """
    )


def test_while_another_thread_is_in_a_region_tags_give_what_they_cache(program):
    program(
        SIZES
        + """
        away = made("away", 0.6)
        saver.pause("away")
        gone = made("cached", 0.6)
        del gone
        entered, may_leave = threading.Event(), threading.Event()
        def stay():
            with saver.region("busy"):
                entered.set()
                may_leave.wait()
        thread = threading.Thread(target=stay)
        thread.start()
        entered.wait()
        saver.resume("away")
        saver.pause("away")
        plain = torch.empty(int(0.7 * TOTAL), dtype=torch.uint8, device="cuda")
        del plain
        try:
            saver.resume("away")
            print("torch empties its cache while a pool is open")
        except ebbtide.OutOfMemoryError:
            pass
        may_leave.set()
        thread.join()
        saver.resume("away")
        """
    )


def test_torchs_own_out_of_memory_says_what_to_call(program):
    program(
        SIZES
        + """
        gone = made("cached", 0.6)
        del gone
        for allocate in (
            lambda: torch.empty(int(0.7 * TOTAL), dtype=torch.uint8, device="cuda"),
            lambda: made("more", 0.7),
        ):
            try:
                allocate()
                raise SystemExit("torch found room")
            except torch.OutOfMemoryError as error:
                assert str(error).startswith("CUDA out of memory") and "ebbtide" not in error.args[0]
                assert str(error).endswith("saver.trim('cached') gives it back."), error
        saver.trim()
        for allocate in (
            lambda: torch.empty(int(0.7 * TOTAL), dtype=torch.uint8, device="cuda"),
            lambda: made("more", 0.7),
        ):
            allocate()
            torch.cuda.empty_cache()
        """
    )


def test_adopt_makes_room(program):
    program(
        SIZES
        + """
        plain = torch.full((int(0.3 * TOTAL) // MIB * MIB,), 7, dtype=torch.uint8, device="cuda")
        gone = made("cached", 0.6)
        del gone
        saver.adopt(plain, tag="adopted")
        assert bool((plain[:: MIB] == 7).all()) and saver.tags()["cached"].size_bytes == 0
        """
    )
