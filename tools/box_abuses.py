"""Commands that take too much of a box, or harm its shell: for tests, which look at whether the box goes on."""

from typing import Final

BOX_ABUSES: Final[dict[str, str]] = {
    "fork bomb": "bomb() { bomb | bomb & }; bomb; sleep 60",
    "fork bomb by a program": (
        "python3 -c 'import os\nwhile True:\n    try:\n        os.fork()\n    except OSError: pass'"
    ),
    "end everyone": "kill -9 -1",
    "end the shell": "kill -9 $$",
    "end the shell later": "(sleep 0.05; kill -9 $$) & true",
    "stop the shell": "kill -STOP $$",
    "stop everyone": "kill -STOP -1",
    "stop the shell's group": "kill -STOP 0",
    "leave": "exit 7",
    "become another program": "exec sleep 60",
    "become a shell that hears nothing": "exec bash --norc <&-",
    "close everything": 'exec 0<&- 1>&- 2>&-; for n in {3..255}; do eval "exec $n>&-"; done',
    "ignore interrupts": "trap '' INT TERM HUP; sleep 60",
    "an interrupt that goes on": "trap 'while true; do sleep 1; done' INT; sleep 60",
    "a trap at each command": "trap 'sleep 60' DEBUG; true",
    "errors end it": "set -e; false",
    "words that do other things": "eval() { sleep 60; }; builtin() { :; }; printf() { :; }; read() { sleep 60; }; true",
    "an alias of the line that tells ends": "alias builtin='sleep 60 #' LC_ALL='sleep 60 #'; true",
    "read what is to come": "while read -r line <&10; do :; done; cat <&11 <&12",
    "a here-document without end": "cat <<THE_END\nmore",
    "no command": "if while ((",
    "output without end": "yes",
    "output without end in the background": "yes & true",
    "an output of anything": "cat /dev/urandom",
    "a line of megabytes": "head -c 3000000 /dev/urandom | tr -c x x",
    "a large environment": "export X=$(head -c 200000 /dev/urandom | tr -c x x); ls",
    "a variable without end": "x=x; while true; do x=$x$x; done",
    "memory": "python3 -c 'x = bytearray(1 << 30); print(len(x))'",
    "memory of many processes": (
        'for n in 1 2 3 4 5 6 7 8; do python3 -c \'x = bytes(60 << 20).replace(bytes(1), b"x"); import time; '
        "time.sleep(60)' & done; sleep 60"
    ),
    "fill the disk": "cat /dev/urandom > large",
    "fill the memory of the kernel": "mkdir many; cd many; for n in {1..70000}; do : > $n || break; done; cd ..",
    "a file of holes": "truncate -s 1T holes || truncate -s 400M holes",
    "fill the shared memory": "cat /dev/urandom > /dev/shm/x",
    "folders in folders": 'python3 -c \'import os\nfor n in range(2000):\n    os.mkdir("d")\n    os.chdir("d")\'',
    "a folder that is gone": "mkdir gone; cd gone; rmdir ../gone",
    "a folder with an odd name": "mkdir \"$(printf 'a\\nb 0 /\\tc')\"; cd a*",
    "many open files": 'for n in {3..250}; do eval "exec $n</dev/null"; done; ls',
    "processes that nobody waits for": "for n in {1..60}; do (sleep 100 &) ; done",
    "processes of their own session": "setsid nohup sleep 100 >/dev/null 2>&1 & disown -a",
    "spin": "while :; do :; done",
    "spin in the background": "for n in 1 2; do (while :; do :; done) & done",
}
