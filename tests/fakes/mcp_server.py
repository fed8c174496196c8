"""A real MCP server with good tools and bad ones: ``python mcp_server.py [http PORT | MISBEHAVIOUR]``."""

import os
import sys
import time
from typing import Any

import anyio
from mcp.server.mcpserver import Image, MCPServer

server = MCPServer("test", log_level="ERROR")
count = 0
PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c49444154789c63f8cfc0000003010100c9fe92ef"
    "0000000049454e44ae426082"
)


@server.tool()
def add(a: int, b: int = 1) -> str:
    """Add two numbers."""
    return str(a + b)


@server.tool()
def tick() -> str:
    """Count the calls of this process."""
    global count
    count += 1
    return str(count)


@server.tool()
def process() -> str:
    """Tell the number of this process."""
    return str(os.getpid())


@server.tool()
def variable(name: str) -> str:
    """Tell a variable of the environment."""
    return os.environ.get(name, "")


@server.tool()
def measure() -> dict[str, float]:
    """Return something structured."""
    return {"width": 2.0, "height": 3.5}


@server.tool(structured_output=False)
def picture() -> list[Any]:
    """Return a text and an image."""
    return ["a pixel:", Image(data=PIXEL, format="png")]


@server.tool()
def refuse() -> str:
    """Raise."""
    raise ValueError("not today")


@server.tool()
async def wait(seconds: float) -> str:
    """Take long."""
    await anyio.sleep(seconds)
    return "done"


@server.tool()
def block() -> str:
    """Hold the whole server up."""
    time.sleep(3600)
    return "never"


@server.tool()
def die() -> str:
    """End the process in the middle of the call."""
    sys.stderr.write("the disk is on fire\n")
    sys.stderr.flush()
    os._exit(3)


@server.tool()
def flood(megabytes: int) -> str:
    """Return a lot."""
    return "x" * (megabytes << 20)


def main() -> None:
    """Serve as the command line says."""
    match sys.argv[1:]:
        case ["http", port]:
            server.run("streamable-http", port=int(port))
        case ["silent"]:
            time.sleep(3600)
        case ["stubborn"]:  # heeds neither the end of its input nor SIGTERM
            import signal

            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            server.run("stdio")
            time.sleep(3600)
        case ["line"]:
            while True:
                os.write(1, b"x" * 65536)
        case ["lines"]:
            while True:
                os.write(1, b"not a message\n" * 4096)
        case ["broken"]:
            sys.exit("ModuleNotFoundError: no such thing as a server")
        case _:
            server.run("stdio")


if __name__ == "__main__":
    main()
