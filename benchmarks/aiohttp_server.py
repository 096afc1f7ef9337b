"""aiohttp's static file server, for the case `peers`: prints its port as JSON, and serves until its standard input ends.

`python -m benchmarks.aiohttp_server FOLDER` serves the files of a folder, with ranges, on 127.0.0.1.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from aiohttp import web


async def serve(folder: Path) -> None:
    application = web.Application()
    application.router.add_static("/", folder)  # responds with `web.FileResponse`
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(json.dumps({"port": runner.addresses[0][1]}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))
