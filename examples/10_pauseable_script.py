"""Makes a finished training script pauseable: SIGUSR1 lends its device memory to others, SIGUSR2 takes it back.

    python examples/10_pauseable_script.py train.py --epochs 3
    kill -USR1 PID

The script stays as it is. Between two steps of its optimizer nothing else is on the device but torch's cache.
"""

import runpy
import signal
import sys
import time

import torch
from ebbtide import saver
from torch.optim.optimizer import register_optimizer_step_post_hook

is_lent = False


def lend(*_):
    global is_lent
    is_lent = True


def take_back(*_):
    global is_lent
    is_lent = False


def after_step(optimizer, *_):
    if is_lent:
        print(saver.adopt(optimizer, tag="job"))  # parameters, gradients, states; tensors in the tag stay
        torch.cuda.empty_cache()
        print(saver.pause("job"), flush=True)
        while is_lent:
            time.sleep(0.1)
        print(saver.resume("job", timeout=3600), flush=True)  # waits until the others have left


if len(sys.argv) < 2:
    sys.exit("usage: 10_pauseable_script.py SCRIPT [ARGUMENTS]")
signal.signal(signal.SIGUSR1, lend)
signal.signal(signal.SIGUSR2, take_back)
register_optimizer_step_post_hook(after_step)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
