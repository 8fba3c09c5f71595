"""A verifier as a user might run it, in all the ways in which it can go wrong; the path says which.

Standard output has a JSON line for its port, for each question (`path`, `type`, `question`), and one, `gone`,
where the asker hung up. Path `/gate` answers when a line comes in on standard input.
"""

from __future__ import annotations

import asyncio
import json
import sys

PASS = b'{"pass": true}'


def reply(body: bytes, status: str = "200 OK", *more: str) -> bytes:
    head = [f"HTTP/1.1 {status}", "content-type: application/json", f"content-length: {len(body)}", *more]
    return "\r\n".join([*head, "", ""]).encode() + body


REPLIES = {
    "/pass": reply(PASS),
    "/more": reply(b'{"pass": true, "reasons": ["all-cited"], "score": 0.9}'),
    "/chunked": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n7\r\n"
    + PASS[:7]
    + b"\r\n7\r\n"
    + PASS[7:]
    + b"\r\n0\r\n\r\n",
    "/fail": reply(b'{"pass": false, "reasons": ["no-such-rule", "wrong-date"]}'),
    "/500": reply(PASS, "500 Internal Server Error"),
    "/202": reply(PASS, "202 Accepted"),
    "/redirect": reply(b"", "307 Temporary Redirect", "location: /pass"),
    "/garbage": b"\x00\x01\x02 no HTTP at all\r\n\r\n",
    "/text": reply(b"yes"),
    "/number": reply(b'{"pass": 1}'),
    "/silent": reply(b"{}"),
    "/sentence": reply(b'{"pass": true, "reasons": ["The answer says Paris."]}'),
    "/deep": reply(b"[" * 10_000),
    "/huge": reply(b'{"pass": true, "x": "' + b"x" * 20_000 + b'"}'),
    "/headers": b"HTTP/1.1 200 OK\r\nx: " + b"x" * 40_000 + b"\r\n\r\n",
    "/cut": reply(PASS)[:-5],
    "/hangs-up": b"",
    "/zip": reply(PASS, "200 OK", "content-encoding: gzip"),
}


def tell(**line: object) -> None:
    print(json.dumps(line), flush=True)


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    path = head.split(" ", 2)[1]
    headers = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if line)
    question = json.loads(await reader.readexactly(int(headers["content-length"])))
    tell(path=path, type=headers["content-type"], question=question)
    if path == "/gate":
        hung_up = asyncio.create_task(reader.read(1))
        opened = asyncio.create_task(GATE.acquire())
        await asyncio.wait({hung_up, opened}, return_when=asyncio.FIRST_COMPLETED)
        if opened.done():
            writer.write(REPLIES["/pass"])
        else:
            opened.cancel()
            tell(gone=True)
    else:
        writer.write(REPLIES[path])
    writer.close()


GATE = asyncio.Semaphore(0)


async def main() -> None:
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    tell(port=server.sockets[0].getsockname()[1])
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    while await reader.readline():
        GATE.release()


if __name__ == "__main__":
    asyncio.run(main())
