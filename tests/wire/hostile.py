"""A client process that does what it is told on standard input, so that it can be killed or stopped in any state.

Run as ``python -m tests.wire.hostile ADDRESS [TOKEN]``; prints one line per order.
"""

import os
import subprocess
import sys
import time

from lmcache_core.wire import records
from lmcache_core.wire.client import DaemonClient
from lmcache_core.wire.codec import frame, to_runs
from tests.wire.daemons import ROOM, fill, key, value


def main():
    address, token = (*sys.argv[1:], "")[:2]
    client = DaemonClient(address, token=token, transfer="tcp" if token else "auto")
    held, loaded, children = [], [], []
    for line in sys.stdin:
        order, *rest = line.split()
        numbers = [int(each) for each in rest]
        if order == "lookup":
            client.lookup([key(n) for n in numbers])
        elif order == "reserve":
            held += client.reserve([(key(n), ROOM + 65536) for n in numbers], None)
        elif order == "write":  # again and again, until stopped or killed
            say("writing")
            while True:
                for reservation in held:
                    reservation.view[ROOM:] = value(numbers[0])
        elif order == "scribble":
            for reservation in held:
                reservation.view[:] = b"\xee" * (ROOM + 65536)
        elif order == "commit":
            identities = [fill(each, numbers[0]) for each in held]
            say(sum(client.commit_batch(held, identities)))
            continue
        elif order == "lease":
            loaded.append(client.load([key(n) for n in numbers], None))
        elif order == "stream":  # asks for values, and reads none of them
            link, until = client._idle[0], time.monotonic() + 60
            runs = to_runs([key(n) for n in numbers])
            link.send([frame(records.Load(99, runs, 60.0, stream=True))], until)
        elif order == "count":
            say(sum(place is not None for place in client.lookup([key(n) for n in numbers]).places))
            continue
        elif order == "fork":  # a helper inherits every descriptor and outlives us
            children.append(subprocess.Popen(["sleep", "30"], close_fds=False, pass_fds=_sockets()))
            say(children[-1].pid)
            continue
        say("done")


def say(what):
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


def _sockets():
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                os.set_inheritable(int(name), True)
                found.append(int(name))
        except OSError:
            continue
    return tuple(found)


if __name__ == "__main__":
    main()
