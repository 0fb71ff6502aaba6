"""Pictures and videos of requests: hostile ones, odd ones, and files of the server's disk."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from polylens.server.options import MediaPolicy, ServerOptions
from tests.families.media import picture, video
from tests.server.conftest import Serve
from tests.server.local import Local
from tests.server.media import PICTURE, QUESTION, ask, data_url, png_bytes, png_url

CHAT = "/v1/chat/completions"


@pytest.fixture
def server(serve: Serve) -> Local:
    return serve(ServerOptions(("tiny",)))


def post(server: Local, *urls: str, kind: str = "image_url", **more: Any) -> tuple[int, str]:
    """Status, and the answer's text or the error's message."""
    messages = ask(QUESTION, *urls)
    for part in messages[0]["content"][:-1]:
        part["type"], part[kind] = kind, part.pop("image_url")
    asked = {"model": "eyes", "messages": messages, "temperature": 0, "max_tokens": 6, **more}
    answer = server.http.post(CHAT, json=asked)
    body = answer.json()
    if answer.status_code == 200:
        return 200, body["choices"][0]["message"]["content"]
    assert body["error"]["param"] == "messages[0].content[0]"
    return answer.status_code, body["error"]["message"]


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


# ---- hostile pictures: refused with a reason


def bomb(width: int, height: int) -> bytes:
    """A PNG that says it is huge; its pixels would be a few kilobytes of zeros, compressed."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    pixels = zlib.compress(b"\0" * 100_000)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


SVG = b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>'

HOSTILE: dict[str, tuple[Callable[[], str], str]] = {
    "truncated PNG": (lambda: data_url(png_bytes(PICTURE)[:-200]), "decoded"),
    "truncated JPEG": (lambda: data_url(saved(PICTURE, "JPEG")[:-200]), "decoded"),
    "30000 x 30000 PNG bomb": (lambda: data_url(bomb(30000, 30000)), "too large"),
    "PNG of no size": (lambda: data_url(bomb(0, 0)), ""),
    "SVG": (lambda: data_url(SVG, "image/svg+xml"), "known format"),
    "HTML sent as PNG": (lambda: data_url(b"<html><script>alert(1)</script></html>"), "known format"),
    "EPS": (lambda: data_url(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"), "known format"),
    "bad base64": (lambda: "data:image/png;base64,@@@", "base64"),
    "no base64": (lambda: "data:image/png,abc", "base64"),
    "empty": (lambda: "data:image/png;base64,", "empty"),
    "32-bit floats": (lambda: data_url(saved(Image.new("F", (8, 8)), "TIFF")), "32 bits"),
    "a bare word": (lambda: "picture.png", "data: URL"),
    "ftp": (lambda: "ftp://example.com/a.png", "data: URL"),
    "nothing": (lambda: "", "data: URL"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_pictures_are_refused_with_a_reason(server: Local, name: str):
    make, reason = HOSTILE[name]
    status, message = post(server, make())
    assert status == 400
    assert reason in message
    assert len(message) < 400


# ---- odd pictures: the same answer as the plain picture they stand for


def rotated() -> bytes:
    """Stored sideways, with the EXIF note that says so."""
    exif = Image.Exif()
    exif[0x0112] = 6
    return saved(PICTURE.rotate(90, expand=True), "PNG", exif=exif)


def animated(kind: str) -> bytes:
    frames = (
        [PICTURE.quantize(), picture(48, 32, seed=8).quantize()] if kind == "GIF" else [PICTURE, PICTURE.rotate(180)]
    )
    return saved(
        frames[0], kind, save_all=True, append_images=frames[1:], **({"lossless": True} if kind == "WEBP" else {})
    )


def grey16() -> bytes:
    grey = np.asarray(PICTURE.convert("L")).astype(np.uint16) * 257
    return saved(Image.fromarray(grey), "PNG")


def see_through() -> bytes:
    clear = Image.new("RGBA", (48, 32), (200, 0, 0, 0))
    return saved(clear, "PNG")


DOT = Image.new("RGB", (1, 1), (9, 9, 9))

ODD: dict[str, tuple[Callable[[], bytes], Callable[[], Image.Image]]] = {
    "EXIF rotation": (rotated, lambda: PICTURE),
    "16-bit PNG": (grey16, lambda: PICTURE.convert("L").convert("RGB")),
    "CMYK JPEG": (
        lambda: saved(PICTURE.convert("CMYK"), "JPEG"),
        lambda: Image.open(io.BytesIO(saved(PICTURE.convert("CMYK"), "JPEG"))).convert("RGB"),
    ),
    "animated GIF": (lambda: animated("GIF"), lambda: PICTURE.quantize().convert("RGB")),
    "animated WebP": (lambda: animated("WEBP"), lambda: PICTURE),
    "transparent PNG": (see_through, lambda: Image.new("RGB", (48, 32), (255, 255, 255))),
    "1-pixel PNG": (lambda: png_bytes(DOT), lambda: DOT),
    "wrong type said": (lambda: png_bytes(PICTURE), lambda: PICTURE),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_odd_pictures_are_what_they_stand_for(server: Local, name: str):
    make, plain = ODD[name]
    answer = post(server, data_url(make(), "image/jpeg"))
    assert answer == post(server, png_url(plain()))
    assert answer[0] == (200 if name != "1-pixel PNG" else answer[0])


def test_orientation_matters(server: Local):
    """The test above can fail: a picture on its side gets another answer."""
    assert post(server, png_url(PICTURE)) != post(server, png_url(PICTURE.rotate(90, expand=True)))


# ---- videos


def clip(num_frames: int = 6) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=2)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for frame in video(num_frames, 64, 48, seed=1):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return file.getvalue()


def test_a_video_is_answered(server: Local):
    assert post(server, data_url(clip(), "video/mp4"), kind="video_url")[0] == 200


def test_how_many_frames_are_taken_is_the_requests_to_say(server: Local):
    def tokens(**settings: float) -> int:
        part = {"type": "video_url", "video_url": {"url": data_url(clip(8), "video/mp4")}}
        messages = [{"role": "user", "content": [part, {"type": "text", "text": QUESTION}]}]
        asked = {"model": "tiny", "messages": messages, "max_tokens": 1, "mm_processor_kwargs": settings}
        answer = server.http.post(CHAT, json=asked)
        assert answer.status_code == 200, answer.text
        return answer.json()["usage"]["prompt_tokens"]

    assert tokens(num_frames=4) < tokens(num_frames=8)
    assert tokens(fps=1.0) < tokens(fps=2.0)


def test_broken_videos_are_refused(server: Local):
    for content in (clip()[:-300], b"#EXTM3U\nhttp://127.0.0.1/x", b"", SVG):
        assert post(server, data_url(content, "video/mp4"), kind="video_url")[0] == 400


def test_pixel_limits_of_a_request_count(server: Local):
    def tokens(**settings: int) -> int:
        asked = {"model": "tiny", "messages": ask(QUESTION, png_url(picture(256, 256, 3))), "max_tokens": 1}
        answer = server.http.post(CHAT, json={**asked, "mm_processor_kwargs": settings} if settings else asked)
        assert answer.status_code == 200, answer.text
        return answer.json()["usage"]["prompt_tokens"]

    assert tokens(max_pixels=16 * 16) < tokens()
    refused = {"model": "tiny", "messages": ask(QUESTION), "mm_processor_kwargs": {"size": 3}}
    assert server.http.post(CHAT, json=refused).json()["error"]["param"] == "mm_processor_kwargs.size"


# ---- files


def test_files_below_the_allowed_folder(serve: Serve, tmp_path: Path):
    root = tmp_path / "pictures"
    (root / "in").mkdir(parents=True)
    PICTURE.save(root / "in" / "a b.png")
    PICTURE.save(tmp_path / "outside.png")
    (root / "link.png").symlink_to(tmp_path / "outside.png")
    (root / "loop").symlink_to(root / "loop")
    server = serve(ServerOptions(("tiny",), media=MediaPolicy(local_root=root)))
    expected = post(server, png_url(PICTURE))
    assert post(server, f"file://{root}/in/a%20b.png") == expected
    assert post(server, f"file://localhost{root}/in/../in/a%20b.png") == expected
    inside = (f"{root}/link.png", f"{root}/../outside.png", f"{root}/%2e%2e/outside.png", f"{root}/none.png")
    for path in (*inside, f"{root}", f"{root}/loop", "/etc/passwd", "/dev/zero", f"{root}/a%00b", ""):
        assert post(server, f"file://{path}") == (400, "messages[0].content[0]: no such file in the allowed folder")


def test_no_files_unless_allowed(server: Local, tmp_path: Path):
    PICTURE.save(tmp_path / "a.png")
    assert "not allowed" in post(server, f"file://{tmp_path}/a.png")[1]


def test_large_files_are_refused(serve: Serve, tmp_path: Path):
    PICTURE.save(tmp_path / "a.png")
    server = serve(ServerOptions(("tiny",), media=MediaPolicy(local_root=tmp_path, max_bytes=100)))
    assert "larger than 100" in post(server, f"file://{tmp_path}/a.png")[1]
